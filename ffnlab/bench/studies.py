"""Cells per hour: two at a time with one thread each, or one after the other with two threads."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ffnlab.bench.startup import TRAIN
from ffnlab.errors import UserError


@dataclass(frozen=True)
class Throughput:
    """Whole runs, start-up and final validation included, by whole processes as a study starts them."""

    tokens_per_cell: int
    together: float  # cells per hour, side by side with one thread each
    in_turn: float  # one after the other with all threads

    @property
    def ratio(self) -> float:
        """How much faster side by side is."""
        return self.together / self.in_turn


def measure_studies(tokens: int, n_cells: int = 2, threads: int = 2, overrides: Sequence[str] = ()) -> Throughput:
    """Time ``n_cells`` short runs each way; ``tokens`` should be enough to make starting up a minor part.

    Raises:
        UserError: a cell failed.
    """
    with tempfile.TemporaryDirectory(prefix="ffnlab-bench-") as folder:
        began = time.perf_counter()
        for cell in range(n_cells):
            _wait(_start(Path(folder) / f"turn-{cell}", cell, threads, tokens, overrides))
        in_turn = time.perf_counter() - began
        began = time.perf_counter()
        running = [_start(Path(folder) / f"together-{cell}", cell, 1, tokens, overrides) for cell in range(n_cells)]
        for process in running:
            _wait(process)
        together = time.perf_counter() - began
    return Throughput(tokens, 3600 * n_cells / together, 3600 * n_cells / in_turn)


def _start(run_dir: Path, seed: int, threads: int, tokens: int, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    words = [f"seed={seed}", f"train.tokens={tokens}", f"hydra.run.dir={run_dir}", "logger=none", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, str(TRAIN), *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _wait(process: "subprocess.Popen[bytes]") -> None:
    _, said = process.communicate()
    if process.returncode:
        raise UserError(f"a cell failed: {said.decode().strip()[-300:]}")
