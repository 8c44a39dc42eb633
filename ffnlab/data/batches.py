"""Batches as pure functions: the same arguments give the same tokens, in any process, after any resume."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
IGNORED = -100  # the target that a loss leaves out

_U64 = (1 << 64) - 1


def generator(data_seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step: Philox, a counter-based generator, keyed by (data_seed, step)."""
    key = np.array([data_seed & _U64, step & _U64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def windows(
    tokens: Tokens, data_seed: int, step: int, batch_size: int, context_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Training batch number ``step``: windows at random offsets, as (inputs_BT, targets_BT), int64.

    Targets are the inputs moved on by one token. ``tokens`` holds at least ``context_length + 1``.
    """
    offsets = generator(data_seed, step).integers(0, len(tokens) - context_length, size=batch_size)
    index = offsets[:, None] + np.arange(context_length + 1)
    rows = torch.from_numpy(np.asarray(tokens).take(index).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def val_windows(
    tokens: Tokens, context_length: int, batch_size: int, limit_tokens: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Consecutive, non-overlapping windows as (inputs_BT, targets_BT): every target exactly once, in order.

    ``limit_tokens``: only the first so many targets. The last window is filled up with input 0 and target
    -100; the last batch may have fewer rows.
    """
    n_targets = max(0, len(tokens) - 1)
    if limit_tokens is not None:
        n_targets = min(n_targets, limit_tokens)
    per_batch = batch_size * context_length
    for start in range(0, n_targets, per_batch):
        count = min(per_batch, n_targets - start)
        n_rows = -(-count // context_length)
        chunk = np.asarray(tokens[start : start + count + 1]).astype(np.int64)
        inputs = np.zeros(n_rows * context_length, dtype=np.int64)
        targets = np.full(n_rows * context_length, IGNORED, dtype=np.int64)
        inputs[:count], targets[:count] = chunk[:-1], chunk[1:]
        shape = (n_rows, context_length)
        yield torch.from_numpy(inputs).view(shape), torch.from_numpy(targets).view(shape)
