"""What a person sees while a run trains: a bar in a terminal, a line now and then in a file."""

import time
from typing import Any

import lightning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ffnlab.training.metrics import Curves

LINE_EVERY_S = 30.0  # where there is no terminal: a log is read later, and grows slowly


class ProgressLine(lightning.Callback):
    """``step x of y, loss, tokens/s, time left``: a bar in a terminal, else a line every half minute."""

    def __init__(self, console: Console, curves: Curves) -> None:
        self.console, self.curves = console, curves
        self._bar: Progress | None = None
        self._task: Any = None
        self._said = time.monotonic()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Open the bar at the step where the run stands."""
        self._said = time.monotonic()
        if not trainer.is_global_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(separator=" of "),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, figures="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar; its figures change when a point was logged."""
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, figures=self._figures())
        elif trainer.is_global_zero and time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            line = f"step {trainer.global_step:>6} of {trainer.max_steps}  {self._figures()}".rstrip()
            self.console.print(line, highlight=False)

    def _figures(self) -> str:
        last = self.curves.last
        return f"loss {last['train/loss']:.3f}  {last['tokens_per_s']:,.0f} tokens/s" if last else ""

    def _whole(self, trainer: lightning.Trainer) -> int:
        stream: Any = trainer.val_dataloaders
        return int(stream.data.n_val_tokens)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """The last validation takes a while: say what is going on."""
        if trainer.is_global_zero and trainer.state.fn == "validate":
            whole = self._whole(trainer)
            self.console.print(f"last: all {whole:,} validation tokens, and the last census", highlight=False)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """One line for each validation on the way."""
        self._said = time.monotonic()
        if trainer.is_global_zero and trainer.state.fn == "fit":
            metrics = pl_module.val_metrics
            line = f"step {trainer.global_step:>6}  val/loss {metrics['val/loss']:.4f}"
            if "val/bpb" in metrics:
                line += f"  val/bpb {metrics['val/bpb']:.4f}"
            # On the way only the first tokens are read, so that the last of these lines is not the final loss.
            whole = self._whole(trainer)
            if metrics["val/tokens"] < whole:
                line += f"  on {metrics['val/tokens']:,.0f} of {whole:,} tokens"
            self.console.print(line, highlight=False)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Close the bar."""
        self.close()

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, so that the message that follows stands alone."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
