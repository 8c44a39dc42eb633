"""The copy task: a text-free check that a block, its model and its optimiser are wired right."""

import hashlib
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import torch
from numpy.typing import NDArray

from ffnlab.data.batches import IGNORED, generator
from ffnlab.data.config import CopyData
from ffnlab.errors import UserError

# the fixed sequences are part of the task, not of a run: equal for every data_seed, and of no run's stream
_FIXED_SEED = -1


class CopyTask:
    """Rows BOS, x, SEP, x with the loss on the second x only; symbols are 0..n_symbols-1, then BOS, SEP.

    ``sequences_NL``: the fixed x's, which are also the validation set. With ``generalise`` they are held
    out and training sees fresh ones at every step; without it they are the training set as well.
    ``context_length``: the length T = 2 L + 1 of the rows, whatever longer context the model allows.
    """

    bytes_per_token: float | None = None  # there is no text, so no bits per byte

    def __init__(self, cfg: CopyData, context_length: int) -> None:
        """Raise UserError if the model's ``context_length`` cannot hold one row."""
        self.length, self.n_symbols, self.generalise = cfg.length, cfg.n_symbols, cfg.generalise
        self.context_length = 2 * cfg.length + 1
        if context_length < self.context_length:
            raise UserError(
                f"model.context_length={context_length} is too short for the copy task: "
                f"data.length={cfg.length} needs {self.context_length}"
            )
        self.bos, self.sep = cfg.n_symbols, cfg.n_symbols + 1
        self.vocab_size = cfg.n_symbols + 2
        self.hash = hashlib.sha256(repr(astuple(cfg)).encode()).hexdigest()[:16]
        self.sequences_NL = self._distinct(cfg.n_sequences)
        self.n_val_tokens = self.sequences_NL.size
        self._held_out = {row.tobytes() for row in self.sequences_NL}

    def _distinct(self, count: int) -> NDArray[np.int64]:
        """``count`` different sequences, in the order drawn."""
        rng = generator(_FIXED_SEED, 0)
        rows: dict[bytes, NDArray[np.int64]] = {}
        while len(rows) < count:
            row = rng.integers(0, self.n_symbols, size=self.length)
            rows.setdefault(row.tobytes(), row)
        return np.stack(list(rows.values()))

    def _rows(self, sequences_NL: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequences as (inputs_NT, targets_NT), T = 2 L + 1."""
        n, length = sequences_NL.shape
        row = np.empty((n, 2 * length + 2), dtype=np.int64)
        row[:, 0], row[:, length + 1] = self.bos, self.sep
        row[:, 1 : length + 1] = row[:, length + 2 :] = sequences_NL
        targets = row[:, 1:].copy()
        targets[:, : length + 1] = IGNORED
        return torch.from_numpy(row[:, :-1].copy()), torch.from_numpy(targets)

    def batch(self, data_seed: int, step: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training batch number ``step``, (inputs_BT, targets_BT): a pure function of its arguments.

        Fixed sequences come in shuffled rounds, so that a batch holds each about equally often.
        """
        rng = generator(data_seed, step)
        if not self.generalise:
            rounds = -(-batch_size // len(self.sequences_NL))
            order = np.concatenate([rng.permutation(len(self.sequences_NL)) for _ in range(rounds)])
            return self._rows(self.sequences_NL[order[:batch_size]])
        fresh_BL = rng.integers(0, self.n_symbols, size=(batch_size, self.length))
        for row_L in fresh_BL:
            while row_L.tobytes() in self._held_out:
                row_L[:] = rng.integers(0, self.n_symbols, size=self.length)
        return self._rows(fresh_BL)

    def val_batches(
        self, batch_size: int, limit_tokens: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The fixed sequences, in order; ``limit_tokens`` (counted in targets) is rounded up to whole rows."""
        count = len(self.sequences_NL)
        if limit_tokens is not None:
            count = min(count, -(-limit_tokens // self.length))
        for start in range(0, count, batch_size):
            yield self._rows(self.sequences_NL[start : min(start + batch_size, count)])

    def prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For a generation check: the prompts BOS, x, SEP (N, L + 2) and the answers x (N, L)."""
        inputs_NT, _ = self._rows(self.sequences_NL)
        return inputs_NT[:, : self.length + 2], torch.from_numpy(self.sequences_NL.copy())
