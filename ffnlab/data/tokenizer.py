"""Tokenizers with one face: byte-level BPE, plain bytes, or somebody's ``tokenizer.json``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ffnlab.data.batches import Tokens
from ffnlab.data.config import TokenizerConfig
from ffnlab.data.hub import first_line
from ffnlab.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")
_TRAIN_CHARACTERS = 64_000_000  # a vocabulary of thousands does not change with more text, only the wait does

# BPE sees pieces of up to 1,024 characters that end at a line end where there is one. Many pieces keep every
# core busy, and the cost of training on one endless "word" grows with its length.
_PIECE = re.compile(r"[\s\S]{0,1023}\n|[\s\S]{1,1024}")
_PIECES_AT_ONCE = 8192  # bounds the memory for encodings


class Tokenizer(Protocol):
    """What the rest of the project uses."""

    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]:
        """Tokens of one text, without marks."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text; end-of-document marks stand for nothing."""
        ...

    def encode_documents(self, texts: list[str]) -> list[Tokens]:
        """Tokens of each text, as ``encode`` gives them."""
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type of the token files: uint16 below 65,536 tokens, else uint32."""
    return np.dtype(np.uint16 if vocab_size < 65_536 else np.uint32)


class ByteTokenizer:
    """UTF-8 bytes 0..255; 256 marks the end of a document."""

    vocab_size = 257
    end_id = 256

    def encode(self, text: str) -> list[int]:
        """Tokens of one text, without marks."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """The text; broken UTF-8 (a model may write it) becomes the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode_documents(self, texts: list[str]) -> list[Tokens]:
        """Tokens of each text, as ``encode`` gives them."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library; ``in_pieces``: encode in pieces, as our own BPE is trained."""

    def __init__(self, inner: HFTokenizer, in_pieces: bool) -> None:
        """Add an end-of-document token unless there is a known one; marks in the text are plain text."""
        self._inner, self._in_pieces = inner, in_pieces
        vocabulary = inner.get_vocab(with_added_tokens=True)
        end = next((end for end in _KNOWN_ENDS if end in vocabulary), None)
        if end is None:
            end = END_OF_DOCUMENT
            inner.add_special_tokens([end])
            vocabulary = inner.get_vocab(with_added_tokens=True)
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self.end_id = vocabulary[end]
        # ids may have gaps, and an embedding needs a row for the highest
        self.vocab_size = max(vocabulary.values()) + 1

    def _pieces(self, text: str) -> list[str]:
        return _PIECE.findall(text) if self._in_pieces else [text]

    def encode(self, text: str) -> list[int]:
        """Tokens of one text, without marks."""
        return self.encode_documents([text])[0].tolist()

    def decode(self, ids: list[int]) -> str:
        """The text; special tokens stand for nothing."""
        return str(self._inner.decode(ids, skip_special_tokens=True))

    def encode_documents(self, texts: list[str]) -> list[Tokens]:
        """Tokens of each text, as ``encode`` gives them."""
        per_text = [self._pieces(text) for text in texts]
        ids = self._ids([piece for pieces in per_text for piece in pieces])
        dtype = token_dtype(self.vocab_size)
        empty = np.empty(0, dtype=dtype)
        return [np.concatenate([empty, *(np.array(next(ids), dtype=dtype) for _ in pieces)]) for pieces in per_text]

    def _ids(self, pieces: list[str]) -> Iterator[list[int]]:
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            part = pieces[start : start + _PIECES_AT_ONCE]
            for encoding in self._inner.encode_batch_fast(part, add_special_tokens=False):
                yield encoding.ids

    def save(self, path: Path) -> None:
        """Write ``tokenizer.json``."""
        path.write_text(self._inner.to_str(), encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int, name: str) -> JsonTokenizer:
    """Byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909; on bytes as in GPT-2) trained on ``texts`` alone.

    Raises UserError if the text has too few repeated pairs for ``vocab_size`` tokens.
    """
    # a later fork (a launcher, a worker) would otherwise print a warning about it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_training_pieces(texts), trainer)
    reached = inner.get_vocab_size()
    if reached < vocab_size:
        raise UserError(
            f"data.tokenizer.vocab_size={vocab_size} is larger than {name} supports: "
            f"use at most {reached}, or data.tokenizer.kind=bytes"
        )
    return JsonTokenizer(inner, in_pieces=True)


def _training_pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    left = _TRAIN_CHARACTERS
    for text in texts:
        yield _PIECE.findall(text[:left])
        left -= len(text)
        if left <= 0:
            return


def load_tokenizer(path: Path, in_pieces: bool) -> JsonTokenizer:
    """Read a ``tokenizer.json``; raises UserError if it is missing or is not one."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer

    if not path.is_file():
        raise UserError(f"there is no tokenizer file {path}: check data.tokenizer.path")
    try:
        text = path.read_text(encoding="utf-8")
        inner = Tokenizer.from_str(text)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer file {path}: {error.strerror}") from error
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {first_line(error)}") from error
    if inner.get_vocab_size() == 0:
        raise UserError(f"the tokenizer in {path} has an empty vocabulary")
    return JsonTokenizer(inner, in_pieces=in_pieces)


def make_tokenizer(cfg: TokenizerConfig, train_texts: Iterable[str], name: str) -> ByteTokenizer | JsonTokenizer:
    """The configured tokenizer; only ``kind=bpe`` looks at ``train_texts``."""
    if cfg.kind == "bytes":
        return ByteTokenizer()
    if cfg.kind == "file":
        return load_tokenizer(Path(cfg.path or "").expanduser(), in_pieces=False)
    return train_bpe(train_texts, cfg.vocab_size, name)
