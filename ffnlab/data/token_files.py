"""Token files on disk: built once, renamed into place, checked when opened, mapped into memory.

One folder a corpus, named by a hash of content and settings: ``train.bin``, ``val.bin`` (the bare tokens),
``tokenizer.json`` (unless tokens are bytes) and ``meta.json`` (counts and checksums).
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ffnlab.data.batches import Tokens, val_windows, windows
from ffnlab.data.tokenizer import Tokenizer
from ffnlab.errors import UserError

log = logging.getLogger(__name__)
META = "meta.json"


@dataclass
class TextTokens:
    """A prepared corpus: ``train`` and ``val`` are read-only memory maps of the token files.

    A stream is ``END d1 END d2 END ... dn END``: an end-of-document mark first and after every document, so
    that each token of each document is a target, and so is each document's end.
    ``val_bytes``: UTF-8 bytes of the validation text. ``bytes_per_token``: ``val_bytes / n_val_tokens``, where
    ``n_val_tokens = len(val) - 1`` counts the targets; marks stand for no bytes but are paid for, hence
    ``bpb = val_loss / ln 2 / bytes_per_token`` is the length of the validation documents in bits, over their
    bytes, whatever the tokenizer. It is exact for a loss over the whole split. It is None where a tokenizer
    (lower-casing, say) does not give back the text: its bits would not stand for these bytes.
    ``hash``: of the tokens and the tokenizer. ``documents``: names by split (the first thousand).
    """

    train: Tokens
    val: Tokens
    vocab_size: int
    val_bytes: int
    hash: str
    tokenizer: Tokenizer
    context_length: int
    reversible: bool = True
    documents: dict[str, list[str]] = field(default_factory=dict)
    n_documents: dict[str, int] = field(default_factory=dict)

    @property
    def n_val_tokens(self) -> int:
        """Targets in the validation split."""
        return len(self.val) - 1

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of validation text a target stands for."""
        return self.val_bytes / self.n_val_tokens if self.reversible else None

    def unigram_loss(self) -> float:
        """Nats per validation token of a model that knows how often each token occurs in training, and no more.

        Counts have one added to each, so that a token never met has a price too. A network that learned anything from
        context lies well below.
        """
        counts = np.bincount(self.train[1:], minlength=self.vocab_size) + 1
        return float(-np.log(counts / counts.sum())[self.val[1:]].mean())

    def batch(self, data_seed: int, step: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training batch number ``step``: (inputs_BT, targets_BT), a pure function of its arguments."""
        return windows(self.train, data_seed, step, batch_size, self.context_length)

    def val_batches(
        self, batch_size: int, limit_tokens: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The validation split in order, each target once; see :func:`ffnlab.data.batches.val_windows`."""
        return val_windows(self.val, self.context_length, batch_size, limit_tokens)


def ensure(cache_dir: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder of ``key`` and its meta, built by ``build(folder) -> meta`` if it is missing or damaged.

    One process builds, the others wait for it. The lock is the operating system's, so it goes with its
    process, however that ends; what a killed builder left is removed by the next.
    Raises UserError when the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    folder = cache_dir / key
    if (meta := read_meta(folder)) is not None:
        return folder, meta
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another process is preparing this corpus: waiting for it")
            lock.acquire()
        try:
            if (meta := read_meta(folder)) is not None:
                return folder, meta
            return folder, _build(cache_dir, key, build)
        finally:
            lock.release()
    except OSError as error:
        raise UserError(
            f"cannot write token files in {cache_dir}: {error.strerror or error}. Set data.cache_dir or FFNLAB_CACHE"
        ) from error


def _build(cache_dir: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    folder = cache_dir / key
    for leftover in cache_dir.glob(f"{key}.tmp-*"):  # we hold the lock: nobody is at work in there
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        log.warning("the token files in %s are damaged: building them again", folder)
        shutil.rmtree(folder)
    draft = cache_dir / f"{key}.tmp-{os.getpid()}"
    draft.mkdir()
    try:
        meta = build(draft)
        meta["files"] = {path.name: _digest(path) for path in sorted(draft.iterdir())}
        meta["checksum"] = _meta_checksum(meta)
        (draft / META).write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")
        for path in draft.iterdir():
            _sync(path)
        draft.rename(folder)
        _sync(cache_dir)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return meta


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What ``meta.json`` says if it and every file it names are whole, else None."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        whole = meta["checksum"] == _meta_checksum(meta) and all(
            _digest(folder / name) == digest for name, digest in meta["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _meta_checksum(meta: dict[str, Any]) -> str:
    said = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk, so that a rename never outruns what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_tokens(path: Path, dtype: np.dtype) -> Tokens:
    """A read-only memory map of one token file."""
    return np.memmap(path, dtype=dtype, mode="r")
