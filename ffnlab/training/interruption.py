"""A run's answer to signals: save first, then stop."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import lightning
import torch

from ffnlab.signals import Interrupted, Signals


class Interruption(lightning.Callback):
    """Stops training at the border of a step, after ``save``; before the first step, where there is nothing to save.

    Lightning's own handlers, which save nothing, stay out.
    """

    def __init__(self, signals: Signals, save: Callable[[lightning.Trainer], None]) -> None:
        self.signals = signals
        self.save = save

    def on_sanity_check_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Lightning registers handlers of its own in each of its stages; ours again."""
        self.signals.take_back()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """As above."""
        self.signals.take_back()

    def on_validation_batch_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        """The validation before the first step may be long."""
        if trainer.sanity_checking and trainer.world_size == 1:
            self.signals.check()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """From now on there is something to save."""
        self.signals.take_back()
        if trainer.world_size == 1:
            self.signals.check()

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop, if asked to. Only at the border of a step: a half-accumulated gradient cannot be saved."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        signum = self._agreed(trainer)
        if signum:
            self.save(trainer)
            raise Interrupted(signum)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The last checkpoint is saved (by a callback before this one); the final validation can be repeated."""
        signum = self._agreed(trainer)
        if signum:
            raise Interrupted(signum)

    def _agreed(self, trainer: lightning.Trainer) -> int:
        """The signal, over all processes: they must stop at the same step."""
        mine = self.signals.signum or 0
        if trainer.world_size == 1:
            return mine
        theirs = torch.tensor(float(mine), device=trainer.strategy.root_device)
        torch.distributed.all_reduce(theirs, op=torch.distributed.ReduceOp.MAX)
        return int(theirs.item())


def requeue_under_slurm(signum: int) -> None:
    """After Slurm's warning signal, put the job back into the queue; it will go on from its checkpoint."""
    job = os.environ.get("SLURM_JOB_ID")
    if signum == signal.SIGUSR1 and job and shutil.which("scontrol"):
        subprocess.run(["scontrol", "requeue", job], check=False, timeout=30)
