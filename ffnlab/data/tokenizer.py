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
from ffnlab.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")
_TRAIN_CHARACTERS = 64_000_000  # a vocabulary of thousands does not change with more text, only the wait does

# BPE sees one line at a time, its newline included: three times faster than whole documents, and no merge
# reaches over a line end. A line without end is cut, since the cost of one "word" grows with its square.
_PIECE = re.compile(r"[^\n]{0,1023}\n|[^\n]{1,1024}")


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
    """A tokenizer of the ``tokenizers`` library; ``by_line``: encode line by line, as our own BPE is trained."""

    def __init__(self, inner: HFTokenizer, by_line: bool) -> None:
        """Add an end-of-document token unless there is a known one; marks in the text are plain text."""
        self._inner, self._by_line = inner, by_line
        known = [end for end in _KNOWN_ENDS if inner.token_to_id(end) is not None]
        end = known[0] if known else END_OF_DOCUMENT
        if not known:
            inner.add_special_tokens([END_OF_DOCUMENT])
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self.end_id = int(inner.token_to_id(end))
        # ids may have gaps, and an embedding needs a row for the highest
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    def _pieces(self, text: str) -> list[str]:
        return _PIECE.findall(text) if self._by_line else [text]

    def encode(self, text: str) -> list[int]:
        """Tokens of one text, without marks."""
        return self.encode_documents([text])[0].tolist()

    def decode(self, ids: list[int]) -> str:
        """The text; special tokens stand for nothing."""
        return str(self._inner.decode(ids, skip_special_tokens=True))

    def encode_documents(self, texts: list[str]) -> list[Tokens]:
        """Tokens of each text, as ``encode`` gives them."""
        per_text = [self._pieces(text) for text in texts]
        flat = [piece for pieces in per_text for piece in pieces]
        encoded = iter(self._inner.encode_batch_fast(flat, add_special_tokens=False))
        dtype = token_dtype(self.vocab_size)
        out: list[Tokens] = []
        for pieces in per_text:
            ids = [i for _ in pieces for i in next(encoded).ids]
            out.append(np.array(ids, dtype=dtype))
        return out

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
    return JsonTokenizer(inner, by_line=True)


def _training_pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    left = _TRAIN_CHARACTERS
    for text in texts:
        yield _PIECE.findall(text[:left])
        left -= len(text)
        if left <= 0:
            return


def load_tokenizer(path: Path, by_line: bool) -> JsonTokenizer:
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
        raise UserError(
            f"{path} is not a tokenizer.json of the tokenizers library: {str(error).splitlines()[0]}"
        ) from error
    if inner.get_vocab_size() == 0:
        raise UserError(f"the tokenizer in {path} has an empty vocabulary")
    return JsonTokenizer(inner, by_line=by_line)


def make_tokenizer(cfg: TokenizerConfig, train_texts: Iterable[str], name: str) -> ByteTokenizer | JsonTokenizer:
    """The configured tokenizer; only ``kind=bpe`` looks at ``train_texts``."""
    if cfg.kind == "bytes":
        return ByteTokenizer()
    if cfg.kind == "file":
        return load_tokenizer(Path(cfg.path or "").expanduser(), by_line=False)
    return train_bpe(train_texts, cfg.vocab_size, name)
