"""Which documents are for validation: deterministic, and the same text never on both sides."""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """One text and what to call it."""

    name: str
    text: str


Documents = Callable[[], Iterator[Document]]  # may be read again and again


def split_documents(documents: Documents, val_fraction: float) -> tuple[Documents, Documents]:
    """Split into (train, validation), about ``val_fraction`` of the bytes for validation.

    Documents are ordered by a hash of their text, and the first of that order validate: file order and names
    play no part, and equal texts fall on one side. Where the documents are too few or too unequal for that
    (a lone file; a book beside a note), so that the share would be off by more than a factor of two, each
    document is cut instead, near its end and at a line end: its last part validates.
    """
    hashes: list[int] = []
    sizes: list[int] = []
    for document in documents():
        data = document.text.encode()
        hashes.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()))
        sizes.append(len(data))
    hash_N, size_N = np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64)
    if len(hash_N) > 1:
        order = np.argsort(hash_N, kind="stable")
        share = np.cumsum(size_N[order]) / max(1, size_N.sum())
        cutoff = hash_N[order[np.argmin(np.abs(share - val_fraction))]]
        is_val = hash_N <= cutoff
        reached = size_N[is_val].sum() / max(1, size_N.sum())
        if val_fraction / 2 <= reached <= min(2 * val_fraction, (1 + val_fraction) / 2):
            return _chosen(documents, ~is_val), _chosen(documents, is_val)

    def heads() -> Iterator[Document]:
        for name, text in documents():
            if head := text[: cut_position(text, val_fraction)]:
                yield Document(name, head)

    def tails() -> Iterator[Document]:
        for name, text in documents():
            if tail := text[cut_position(text, val_fraction) :]:
                yield Document(name, tail)

    return heads, tails


def _chosen(documents: Documents, keep_N: np.ndarray) -> Documents:
    def chosen() -> Iterator[Document]:
        return (document for document, keep in zip(documents(), keep_N, strict=True) if keep)

    return chosen


def cut_position(text: str, val_fraction: float) -> int:
    """Where the validation part of a lone document starts.

    The last line end (else the last space) before ``1 - val_fraction`` of the characters, looked for in a
    stretch as long as the validation part; a text without either is cut right there.
    """
    wanted = int(len(text) * (1 - val_fraction))
    earliest = max(0, wanted - int(len(text) * val_fraction))
    for boundary in ("\n", " "):
        found = text.rfind(boundary, earliest, wanted)
        if found >= 0:
            return found + 1
    return wanted
