"""Signals: save first, then stop."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import lightning
import torch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupted(BaseException):
    """A signal asked the run to stop; what could be saved is saved. ``exit_code`` is the shell's 128 + signal.

    Like KeyboardInterrupt it is no Exception, so that nobody who shields a run from failures swallows it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """143 for SIGTERM and SIGUSR1 (Slurm's warning before it), 130 for Ctrl-C."""
        return 130 if self.signum == signal.SIGINT else 143


class Interruption(lightning.Callback):
    """Acts on a signal when it does no harm. A second Ctrl-C quits at once.

    Between ``on_train_start`` and ``on_train_end`` a signal is noted and acted on at the border of a step, after
    ``save``. Before and after, where there is nothing to save, it raises Interrupted at once. After ``leave`` the run
    is done but for its last lines, and no signal changes that.

    Use as a context manager around the whole run: Lightning's own handlers, which save nothing, stay out.
    """

    def __init__(self) -> None:
        self.save: Callable[[lightning.Trainer], None] | None = None
        self.signum: int | None = None
        self._at_once = True
        self._left = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        """Take the signals over."""
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Give the signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def leave(self) -> None:
        """From here on the run finishes in any case."""
        self._left = True

    def _note(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum is not None
        if signum == signal.SIGINT and self.signum == signal.SIGINT:
            os._exit(130)
        self.signum = signum
        if self._left or again:
            return
        if self._at_once:
            raise Interrupted(signum)
        if signum == signal.SIGINT:
            os.write(2, b"\nstopping after this step; Ctrl-C again quits at once\n")

    def _take_back(self) -> None:
        """Lightning registers handlers of its own in each of its stages; ours again."""
        for signum in self._before:
            signal.signal(signum, self._note)

    def on_sanity_check_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The validation before the first step."""
        self._take_back()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The final validation."""
        self._take_back()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """From now on there is something to save."""
        self._take_back()
        self._at_once = False

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save and stop, if asked to. Only at the border of a step: a half-accumulated gradient cannot be saved."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        signum = self._agreed(trainer)
        if signum:
            self._stop(trainer, signum)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The last checkpoint is saved (by a callback before this one); the final validation can be repeated."""
        self._at_once = trainer.world_size == 1
        signum = self._agreed(trainer)
        if signum:
            raise Interrupted(signum)

    def _stop(self, trainer: lightning.Trainer, signum: int) -> None:
        if self.save is not None:
            self.save(trainer)
        raise Interrupted(signum)

    def _agreed(self, trainer: lightning.Trainer) -> int:
        """The signal, over all processes: they must stop at the same step."""
        if trainer.world_size == 1:
            return self.signum or 0
        mine = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
        torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
        return int(mine.item())


def requeue_under_slurm(signum: int) -> None:
    """After Slurm's warning signal, put the job back into the queue; it will go on from its checkpoint."""
    job = os.environ.get("SLURM_JOB_ID")
    if signum == signal.SIGUSR1 and job and shutil.which("scontrol"):
        subprocess.run(["scontrol", "requeue", job], check=False, timeout=30)
