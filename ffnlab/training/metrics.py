"""The training and validation curves, sent to every logger of the trainer (the ledger first)."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import lightning
import numpy as np
import torch


def log_to_all(trainer: lightning.Trainer, metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Send one point to each logger; on the first process only."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=trainer.global_step if step is None else step)


class Curves(lightning.Callback):
    """Logs the mean training loss over each ``log_every`` steps, and every validation.

    ``tokens_per_s`` counts training time alone. A gradient norm above ``spike`` times its running mean is logged at its
    step as ``grad_norm_spike``.
    """

    def __init__(self, log_every: int, tokens_per_step: int, flops_per_token: int, spike: float = 10.0) -> None:
        self.log_every, self.tokens_per_step, self.flops_per_token = log_every, tokens_per_step, flops_per_token
        self.spike = spike
        self.last: dict[str, float] = {}
        self._losses: list[float] = []
        self._norm_mean: float | None = None
        self._since = self._paused = 0.0
        self._since_step = 0
        self._train_steps = 0
        self._train_seconds = 0.0

    @property
    def mean_tokens_per_s(self) -> float:
        """Training throughput over all sittings, validation excluded."""
        return self._train_steps * self.tokens_per_step / max(self._train_seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """The open window, so that a resumed run logs the same points, and the last point, which the result quotes."""
        timing = {"steps": self._train_steps, "seconds": self._train_seconds}
        return {"losses": self._losses, "norm_mean": self._norm_mean, "last": self.last, "timing": timing}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._losses = list(state_dict["losses"])
        self._norm_mean = state_dict["norm_mean"]
        self.last = dict(state_dict["last"])
        self._train_steps, self._train_seconds = state_dict["timing"]["steps"], state_dict["timing"]["seconds"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Start the clock of the first window."""
        self._since, self._paused, self._since_step = time.perf_counter(), 0.0, trainer.global_step

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Stop the clock."""
        self._pause_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step add its losses; at the end of a window, log a point."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._losses += pl_module.step_losses
        self._watch_norm(trainer, pl_module.grad_norm)
        step = trainer.global_step
        if step % self.log_every and step != trainer.max_steps:
            return
        mean = statistics.fmean(self._losses)
        if pl_module.share[0] > 1:
            here = torch.tensor(mean, dtype=torch.float64, device=pl_module.device)
            mean = float(trainer.strategy.reduce(here, reduce_op="mean"))
        seconds = time.perf_counter() - self._since - self._paused
        steps = step - self._since_step
        self._train_steps += steps
        self._train_seconds += seconds
        self.last = {
            "train/loss": mean,
            "lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "grad_norm": pl_module.grad_norm,
            "tokens_per_s": steps * self.tokens_per_step / max(seconds, 1e-9),
            "flops": float(step * self.tokens_per_step * self.flops_per_token),
        }
        log_to_all(trainer, self.last)
        self._losses = []
        self._since, self._paused, self._since_step = time.perf_counter(), 0.0, step

    def _watch_norm(self, trainer: lightning.Trainer, norm: float) -> None:
        if self._norm_mean is None:
            self._norm_mean = norm
        if norm > self.spike * self._norm_mean:
            log_to_all(trainer, {"grad_norm_spike": norm})
        self._norm_mean += 0.02 * (norm - self._norm_mean)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Log the figures; those of the whole set, read once at the end, are called ``final/...``."""
        final = trainer.state.fn == "validate"
        metrics = pl_module.val_metrics
        log_to_all(trainer, {k.replace("val/", "final/") if final else k: v for k, v in metrics.items()})
        self._paused += time.perf_counter() - self._pause_began


def seed_generators(seed: int) -> None:
    """``torch.manual_seed`` for the devices in use.

    The original formats a stack trace for every kind of device that was never started, which took 6% of a small step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class DropoutStream(lightning.Callback):
    """Gives each part of each step, on each process, a random stream of its own.

    Dropout then depends on (seed, step, part, process) and on nothing before it: a resumed run draws what an
    uninterrupted one draws, without any saved generator state, whatever the initialisation or the data drew.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Seed torch's generators, on the CPU and on every GPU."""
        part = batch_idx % trainer.accumulate_grad_batches
        entropy = (self.seed, trainer.global_step, part, pl_module.share[1])
        seed_generators(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
