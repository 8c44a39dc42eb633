"""From a configuration to data that training can read."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ffnlab.data.config import CopyData, TextCorpus, cache_folder
from ffnlab.data.copy_task import CopyTask
from ffnlab.data.corpora import Corpus, open_corpus
from ffnlab.data.splits import Documents
from ffnlab.data.token_files import TextTokens, ensure, map_tokens
from ffnlab.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
)
from ffnlab.errors import UserError

log = logging.getLogger(__name__)

Data = TextTokens | CopyTask

_FORMAT = 1  # raise it whenever the same settings would give other token files
_NAMES_KEPT = 1000
_DOCUMENTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 8_000_000


def prepare(cfg: TextCorpus | CopyData, context_length: int, cache_dir: Path | None = None) -> Data:
    """The data that ``cfg`` asks for, ready for training; token files are built on the first call.

    ``context_length``: that of the model. ``cache_dir`` overrides ``cfg.cache_dir``.
    Raises UserError for anything wrong with the files, the settings or the cache.
    """
    if context_length < 1:
        raise UserError(f"model.context_length={context_length} must be at least 1")
    if isinstance(cfg, CopyData):
        return CopyTask(cfg, context_length)
    corpus = open_corpus(cfg)

    def build(folder: Path) -> dict[str, Any]:
        return _build(cfg, corpus, context_length, folder)

    folder, meta = ensure(cache_dir or cache_folder(cfg.cache_dir), _key(cfg, corpus), build)
    dtype = np.dtype(meta["dtype"])
    data = TextTokens(
        train=map_tokens(folder / "train.bin", dtype),
        val=map_tokens(folder / "val.bin", dtype),
        vocab_size=meta["vocab_size"],
        val_bytes=meta["val_bytes"],
        hash=meta["hash"],
        tokenizer=_load_tokenizer(cfg, folder),
        context_length=context_length,
        reversible=meta["reversible"],
        documents=meta["documents"],
        n_documents=meta["n_documents"],
    )
    if len(data.train) <= context_length:
        raise _too_short(corpus.name, len(data.train), context_length)
    return data


def _too_short(name: str, n_tokens: int, context_length: int) -> UserError:
    return UserError(
        f"{name} is too short: {n_tokens} tokens for training, but one context needs {context_length + 1}. "
        "Use more text or a smaller model.context_length"
    )


def _key(cfg: TextCorpus, corpus: Corpus) -> str:
    """The name of the token files' folder: kind and a hash of content and settings."""
    settings: dict[str, Any] = {"format": _FORMAT, "corpus": corpus.identity, "val_fraction": cfg.val_fraction}
    tokenizer = cfg.tokenizer
    settings["tokenizer"] = tokenizer.kind
    if tokenizer.kind == "bpe":
        settings["vocab_size"] = tokenizer.vocab_size
    if tokenizer.kind == "file":
        path = Path(tokenizer.path or "").expanduser()
        load_tokenizer(path, in_pieces=False)  # refuse a bad file before anything else
        settings["tokenizer_json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if tokenizer.kind != "bytes":
        settings["tokenizers"] = version("tokenizers")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{cfg.kind}-{digest[:16]}"


def _load_tokenizer(cfg: TextCorpus, folder: Path) -> Tokenizer:
    if cfg.tokenizer.kind == "bytes":
        return ByteTokenizer()
    return load_tokenizer(folder / "tokenizer.json", in_pieces=cfg.tokenizer.kind == "bpe")


def _build(cfg: TextCorpus, corpus: Corpus, context_length: int, folder: Path) -> dict[str, Any]:
    """Write the token files into ``folder``; what they hold is returned for ``meta.json``."""
    started = time.perf_counter()
    log.info("preparing %s", corpus.name)
    train, val = corpus.split(cfg.val_fraction)
    _refuse_hopeless(corpus.name, train, context_length)
    tokenizer = make_tokenizer(cfg.tokenizer, (document.text for document in train()), corpus.name)
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.save(folder / "tokenizer.json")
    parts = {
        "train": _write_tokens(train, tokenizer, folder / "train.bin", check=False),
        "val": _write_tokens(val, tokenizer, folder / "val.bin", check=True),
    }
    if parts["val"]["n_tokens"] < 2:
        raise UserError(f"{corpus.name} leaves no text for validation: use more text or a larger data.val_fraction")
    reversible = parts["val"]["reversible"]
    if not reversible:
        log.warning("the tokenizer does not give back the text it is given: no bits per byte")
    log.info(
        "prepared %s: %d tokens for training, %d for validation, in %.1f s",
        corpus.name,
        parts["train"]["n_tokens"],
        parts["val"]["n_tokens"],
        time.perf_counter() - started,
    )
    content = [parts["train"]["sha256"], parts["val"]["sha256"], tokenizer.vocab_size, tokenizer.end_id]
    if isinstance(tokenizer, JsonTokenizer):
        content.append(hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest())
    return {
        "corpus": corpus.name,
        "settings": asdict(cfg) | {"cache_dir": None},
        "hash": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "val_bytes": parts["val"]["n_bytes"],
        "reversible": reversible,
        "documents": {split: part["names"] for split, part in parts.items()},
        "n_documents": {split: part["n_documents"] for split, part in parts.items()},
    }


def _refuse_hopeless(name: str, train: Documents, context_length: int) -> None:
    """Refuse a text without enough bytes for one context, whatever the tokenizer, before time goes into it."""
    n_bytes = 1  # the first mark
    for document in train():
        n_bytes += len(document.text.encode()) + 1
        if n_bytes > context_length:
            return
    if n_bytes == 1:
        raise UserError(f"{name} holds no text for training: every document is blank or in the validation split")
    raise _too_short(name, n_bytes, context_length)


def _write_tokens(documents: Documents, tokenizer: Tokenizer, path: Path, check: bool) -> dict[str, Any]:
    """Write ``END d1 END d2 END ...``; ``check``: see whether decoding gives back every text."""
    dtype = token_dtype(tokenizer.vocab_size)
    mark = np.array([tokenizer.end_id], dtype=dtype).tobytes()
    digest = hashlib.sha256(mark)
    names: list[str] = []
    n_bytes, n_tokens, n_documents, reversible = 0, 1, 0, True
    with path.open("wb") as file:
        file.write(mark)
        for batch in _batches(documents):
            texts = [document.text for document in batch]
            for document, tokens in zip(batch, tokenizer.encode_documents(texts), strict=True):
                data = tokens.astype(dtype, copy=False).tobytes() + mark
                file.write(data)
                digest.update(data)
                n_tokens += len(tokens) + 1
                n_bytes += len(document.text.encode())
                n_documents += 1
                if len(names) < _NAMES_KEPT:
                    names.append(document.name)
                if check and reversible:
                    reversible = tokenizer.decode(tokens.tolist()) == document.text
    return {
        "n_tokens": n_tokens,
        "n_bytes": n_bytes,
        "n_documents": n_documents,
        "names": names,
        "reversible": reversible,
        "sha256": digest.hexdigest(),
    }


def _batches(documents: Documents) -> Iterator[list[Any]]:
    """Documents in lists that are long enough to keep every core busy and short enough for the memory."""

    batch: list[Any] = []
    size = 0
    for document in documents():
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _DOCUMENTS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
