"""What all contenders of a race share: shape, batch, optimiser, precision, threads."""

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ffnlab.config import RunConfig, compose

SHAPES: dict[str, list[str]] = {
    "tiny": ["model=tiny"],
    # nanoGPT's CPU setting: 768 tokens a step. Its vocabulary is characters; bytes are the nearest that we have.
    "nanogpt-cpu": [
        "model.d_model=128",
        "model.n_layers=4",
        "model.n_heads=4",
        "model.context_length=64",
        "train.batch_size=12",
        "data.tokenizer.kind=bytes",
    ],
    "small": ["model=small", "train.batch_size=64"],
    "base": ["model=base", "train.batch_size=16"],
}


@dataclass(frozen=True)
class Setting:
    """One shape on one machine. ``overrides`` come on top of the shape's own, as typed after ``train.py``."""

    shape: str
    ffn: str = "gelu"
    threads: int = 2
    device: Literal["cpu", "cuda"] = "cpu"
    clock: Literal["wall", "cpu"] = "wall"  # cpu: processor time, for a machine that others are using (one thread)
    overrides: list[str] = field(default_factory=list)

    def config(self, *more: str) -> RunConfig:
        """The run's configuration at this setting, the ledger its only logger.

        Raises:
            UserError: overrides that do not compose.
        """
        accelerator = "gpu" if self.device == "cuda" else "cpu"
        fixed = [f"ffn={self.ffn}", "logger=none", f"trainer.accelerator={accelerator}"]
        return compose([*SHAPES[self.shape], *fixed, *self.overrides, *more])

    def apply(self) -> None:
        """Set this process's threads, and flush denormals as a run does."""
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)

    def now(self) -> float:
        """The clock, in seconds."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def autocast(self) -> torch.autocast:
        """Mixed bfloat16 on a GPU, plain float32 on the CPU: what ``trainer.precision=auto`` chooses."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def peak_bytes(self) -> int:
        """The most memory held so far: on a GPU what was allocated there, on the CPU what the process held."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status")
        if status.exists():  # Linux counts its parent's memory into a child's ru_maxrss
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def synchronise(self) -> None:
        """Wait for the GPU, so that a clock read afterwards is honest."""
        if self.device == "cuda":
            torch.cuda.synchronize()
