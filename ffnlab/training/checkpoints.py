"""Checkpoints that survive: written aside, flushed, renamed; the one before is kept."""

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ffnlab.errors import UserError

LAST, PREVIOUS, BEST, FINAL = "last.ckpt", "previous.ckpt", "best.ckpt", "final.safetensors"


class Checkpoints(lightning.Callback):
    """Saves ``last`` after every validation (and when asked to), keeps ``previous`` and ``best``.

    Saving happens between two batches, where Lightning's own counters are unambiguous, not inside the validation loop.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "checkpoints"
        self.best = float("inf")
        self._due = False
        self._is_best = False

    def state_dict(self) -> dict[str, Any]:
        """The best validation loss so far, so that a resumed run goes on comparing with it."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.best = float(state_dict["best"])

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Note that a checkpoint is due."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._due = True
            loss = float(pl_module.val_metrics["val/loss"])
            if loss < self.best:
                self.best, self._is_best = loss, True

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save what the last validation asked for."""
        if self._due:
            self.save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Save the end of training, from which the final validation can be repeated."""
        self.save(trainer)

    def save(self, trainer: lightning.Trainer) -> None:
        """Save ``last`` now."""
        self._due = False
        temporary = self.folder / "saving.tmp"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            trainer.save_checkpoint(temporary)
            if not trainer.is_global_zero:
                return
            _flush(temporary)
        except OSError:
            if trainer.is_global_zero:
                temporary.unlink(missing_ok=True)
            raise
        last = self.folder / LAST
        if last.exists():
            last.replace(self.folder / PREVIOUS)
        temporary.replace(last)
        if self._is_best:
            self._is_best = False
            link = self.folder / "best.tmp"
            link.unlink(missing_ok=True)
            os.link(last, link)
            link.replace(self.folder / BEST)
        _flush(self.folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without unpickling code.

    Raises:
        UserError: it is missing, cut short, or no checkpoint of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # a damaged archive raises whatever its reader stumbles over
        raise UserError(f"{path} is damaged or no checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or "global_step" not in content or "state_dict" not in content:
        raise UserError(f"{path} is no checkpoint of a run")
    return content


def newest_checkpoint(run_dir: Path) -> tuple[Path, int] | None:
    """The newest checkpoint that can be read, and its step; None when a run has none yet.

    A damaged file is named and the one before it is used.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    problems = []
    for name in (LAST, PREVIOUS):
        path = run_dir / "checkpoints" / name
        if not path.exists():
            continue
        try:
            step = int(load_checkpoint(path)["global_step"])
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            rank_zero_info(f"{problem}; using {path} (step {step}) instead")
        return path, step
    if problems:
        raise UserError("; ".join(problems))
    return None


def load_weights(network: torch.nn.Module, state: dict[str, Any], source: Path, prefix: str = "network.") -> None:
    """Fill ``network`` from a checkpoint's ``state_dict``.

    Raises:
        UserError: the checkpoint is of another shape; the first difference is named.
    """
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    own = network.state_dict()
    for name, tensor in own.items():
        if name not in weights:
            raise UserError(f"{source} does not fit this configuration: it has no {name}")
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"{source} does not fit this configuration: {name} is {tuple(weights[name].shape)} there, "
                f"{tuple(tensor.shape)} here"
            )
    extra = sorted(set(weights) - set(own))
    if extra:
        raise UserError(f"{source} does not fit this configuration: it also has {extra[0]}")
    network.load_state_dict(weights)
