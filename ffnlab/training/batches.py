"""From the data's pure functions to the streams that Lightning reads.

There are no loaders, workers or samplers: a batch is a function of (data_seed, step), so each process computes the rows
that are its own, and a resumed run simply asks for the next step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ffnlab.data import Data
from ffnlab.errors import UserError

Batch = tuple[Tensor, Tensor]  # inputs_BT, targets_BT


@dataclass(frozen=True)
class Cut:
    """How the batch of one optimiser step is shared out: ``parts`` one after the other, over ``world`` processes."""

    batch_size: int
    parts: int
    world: int
    rank: int

    def __post_init__(self) -> None:
        """Refuse a batch that cannot be cut evenly."""
        if self.batch_size % (self.parts * self.world):
            raise UserError(
                f"train.batch_size={self.batch_size} must be a multiple of "
                f"trainer.accumulate_grad_batches * processes = {self.parts} * {self.world}"
            )

    def rows(self, part: int) -> slice:
        """The rows of the whole batch that this process handles in ``part``."""
        size = self.batch_size // (self.parts * self.world)
        start = (part * self.world + self.rank) * size
        return slice(start, start + size)


class TrainStream:
    """Endless batches, from the step at which the run stands when iteration begins."""

    def __init__(self, data: Data, data_seed: int, cut: Cut, first_step: Callable[[], int]) -> None:
        self.data, self.data_seed, self.cut, self.first_step = data, data_seed, cut, first_step

    def __iter__(self) -> Iterator[Batch]:
        """Yield (inputs, targets) of one part of one step after the other."""
        step = self.first_step()
        while True:
            inputs_BT, targets_BT = self.data.batch(self.data_seed, step, self.cut.batch_size)
            for part in range(self.cut.parts):
                rows = self.cut.rows(part)
                yield _pinned((inputs_BT[rows], targets_BT[rows]))
            step += 1


class ValStream:
    """The validation batches of one process: each batch goes to one process, in turn."""

    def __init__(self, data: Data, batch_size: int, limit_tokens: int | None, world: int, rank: int) -> None:
        self.data, self.batch_size, self.limit_tokens = data, batch_size, limit_tokens
        self.world, self.rank = world, rank

    def __iter__(self) -> Iterator[Batch]:
        """Yield (inputs, targets); targets of -100 do not count."""
        for index, batch in enumerate(self.data.val_batches(self.batch_size, self.limit_tokens)):
            if index % self.world == self.rank:
                yield _pinned(batch)


def _pinned(batch: Batch) -> Batch:
    """In memory from which a GPU copies while the CPU goes on, where there is a GPU."""
    if not torch.cuda.is_available():
        return batch
    inputs_BT, targets_BT = batch
    return inputs_BT.pin_memory(), targets_BT.pin_memory()


def order_hash(data: Data, data_seed: int, batch_size: int, n_steps: int) -> str:
    """Hash of the batch order, from the first and last batches: equal for two runs that see the same tokens."""
    import hashlib

    digest = hashlib.sha256(f"{batch_size}:{n_steps}".encode())
    for step in sorted({0, 1, n_steps // 2, n_steps - 1} & set(range(n_steps))):
        digest.update(data.batch(data_seed, step, batch_size)[0].numpy().tobytes())
    return digest.hexdigest()[:16]
