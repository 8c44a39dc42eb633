"""Run contenders in turns, A B C A B C ..., and compare them within each turn.

The machine's speed drifts, and others may be using it; what is compared happened within the same second or two. So
ratios are taken round by round, and their median and quartiles are reported.
"""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ffnlab.bench.contenders import OURS, PEERS, missing
from ffnlab.bench.setting import Setting
from ffnlab.bench.workers import serve
from ffnlab.errors import UserError

CONTENDERS = ("ffnlab", *OURS, *PEERS, "products")
PATIENCE_S = 600.0  # for one answer of a worker; loading and compiling included


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        low, median, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


@dataclass
class Record:
    """What one contender did: seconds of each slice, and which slices held a validation."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    validated: list[bool] = field(default_factory=list)


@dataclass
class Race:
    """The records of all contenders at one setting, by name, slices in step with each other."""

    setting: Setting
    slice_steps: int
    tokens_per_step: int
    records: dict[str, Record]

    def ms_per_step(self, name: str) -> Spread:
        """Milliseconds for one step, slices with a validation left out."""
        record = self.records[name]
        return Spread.of([1e3 * record.seconds[i] / self.slice_steps for i in self._plain(name)])

    def speed(self, name: str, against: str) -> Spread:
        """How many times as many steps per second ``name`` makes as ``against``, training steps alone."""
        mine, theirs = self.records[name].seconds, self.records[against].seconds
        return Spread.of([theirs[i] / mine[i] for i in self._plain(name, against)])

    def validation_seconds(self, name: str) -> float | None:
        """What one validation with its census and checkpoint adds; None where none fell into the race."""
        record = self.records[name]
        with_it = [s for s, v in zip(record.seconds, record.validated, strict=True) if v]
        if not with_it:
            return None
        return float(np.median(with_it)) - self.ms_per_step(name).median * self.slice_steps / 1e3

    def _plain(self, *names: str) -> list[int]:
        n = min(len(self.records[name].seconds) for name in names)
        plain = [i for i in range(n) if not any(self.records[name].validated[i] for name in names)]
        if not plain:
            raise UserError("every slice of the race held a validation: make slices shorter than train.val_every")
        return plain


class _Worker:
    """A contender's process, seen from the parent."""

    def __init__(self, name: str, setting: Setting, slice_steps: int, n_slices: int) -> None:
        # Spawned, not forked: a forked child has none of torch's threads.
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(name, setting, slice_steps, n_slices, theirs), name=f"bench-{name}", daemon=True
        )
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[Any, ...]:
        """The worker's next message.

        Raises:
            UserError: it failed, died, or does not answer.
        """
        try:
            if not self.pipe.poll(PATIENCE_S):
                raise UserError(f"{self.name} did not answer within {PATIENCE_S:.0f} s")
            message: tuple[Any, ...] = self.pipe.recv()
        except EOFError:
            raise UserError(f"{self.name} stopped without a word; is there enough memory?") from None
        if message[0] == "error":
            raise UserError(message[1])
        return message

    def end(self) -> None:
        """Make sure that nothing is left behind."""
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_race(names: Sequence[str], setting: Setting, n_slices: int, slice_steps: int) -> Race:
    """Let ``names`` (of ``CONTENDERS``) train in turns.

    Raises:
        UserError: an unknown contender, one that cannot start, or fails on the way.
    """
    for name in names:
        if name not in CONTENDERS:
            raise UserError(f"unknown contender '{name}'; choose one of {', '.join(CONTENDERS)}")
    if lacking := [lack for name in names if (lack := missing(name))]:
        raise UserError("\n".join(lacking))
    cfg = setting.config()
    workers: list[_Worker] = []
    records: dict[str, Record] = {}
    try:
        for name in names:  # one after the other: starting is heavy, and the start of one must not disturb another
            worker = _Worker(name, setting, slice_steps, n_slices)
            workers.append(worker)
            records[name] = Record(name, facts=worker.answer()[1])
        for turn in range(n_slices):
            shift = turn % len(workers)  # nobody is always first
            for worker in workers[shift:] + workers[:shift]:
                worker.pipe.send("go")
                _, seconds, validated = worker.answer()
                records[worker.name].seconds.append(seconds)
                records[worker.name].validated.append(validated)
        for worker in workers:
            worker.pipe.send("stop")
            records[worker.name].facts |= worker.answer()[1]
    finally:
        for worker in workers:
            worker.end()
    return Race(setting, slice_steps, cfg.train.batch_size * cfg.model.context_length, records)
