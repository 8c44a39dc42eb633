"""Signals: save first, then stop."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import lightning

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupted(Exception):
    """A signal asked the run to stop; its checkpoint is saved. ``exit_code`` is the shell's 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """143 for SIGTERM and SIGUSR1 (Slurm's warning before it), 130 for Ctrl-C."""
        return 130 if self.signum == signal.SIGINT else 143


class Interruption(lightning.Callback):
    """Notes a signal when it comes and acts on it between two batches. A second Ctrl-C quits at once.

    Use as a context manager around the whole run: Lightning's own handlers, which save nothing, stay out.
    """

    def __init__(self, save: Callable[[lightning.Trainer], None]) -> None:
        self.save = save
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        """Take the signals over."""
        import threading

        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Give the signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum == signal.SIGINT:
            os._exit(130)
        if self.signum is None and signum == signal.SIGINT:
            os.write(2, b"\nstopping after this step; Ctrl-C again quits at once\n")
        self.signum = signum

    def check(self) -> None:
        """Raise Interrupted if a signal has come. For moments at which there is nothing to save."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Lightning registered its handlers just now; ours again."""
        if self._before:
            for signum in SIGNALS:
                signal.signal(signum, self._note)

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop, if asked to. Only at the border of a step: a half-accumulated gradient cannot be saved."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        signum = self._agreed(trainer)
        if signum:
            self.save(trainer)
            raise Interrupted(signum)

    def _agreed(self, trainer: lightning.Trainer) -> int:
        """The signal, over all processes: they must stop at the same step."""
        if trainer.world_size == 1:
            return self.signum or 0
        import torch

        mine = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
        torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
        return int(mine.item())

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The final validation can simply be repeated: stop there at once."""
        if trainer.state.fn == "validate" and trainer.world_size == 1:
            self.check()


def requeue_under_slurm(signum: int) -> None:
    """After Slurm's warning signal, put the job back into the queue; it will go on from its checkpoint."""
    job = os.environ.get("SLURM_JOB_ID")
    if signum == signal.SIGUSR1 and job and shutil.which("scontrol"):
        subprocess.run(["scontrol", "requeue", job], check=False, timeout=30)
