"""Checkpoints that survive: written aside, flushed, renamed; the one before is kept."""

import contextlib
import io
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ffnlab.errors import UserError
from ffnlab.training.ledger import Ledger
from ffnlab.training.parallel import is_sharded

LAST, PREVIOUS, BEST, FINAL = "last.ckpt", "previous.ckpt", "best.ckpt", "final.safetensors"


class FlushedFiles(TorchCheckpointIO):
    """Writes a checkpoint where it belongs and on to the disk.

    Lightning's own way leads through the system's temporary folder, which may be another, smaller disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; OSError (a full disk) leaves nothing behind."""
        content = io.BytesIO()  # torch.save on a file that fails hides the reason
        torch.save(checkpoint, content)
        write_flushed(Path(path), content.getbuffer())


def write_flushed(path: Path, content: bytes | memoryview) -> None:
    """Write a whole file and wait until the disk has it; on OSError nothing stays."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


class Checkpoints(lightning.Callback):
    """Saves ``last`` before the first step, after every validation and when asked to; keeps ``previous`` and ``best``.

    Saving happens between two steps, not inside the validation loop, so that there is one place to go on from. A
    checkpoint also says how many points the ledger held then.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.folder = ledger.run_dir / "checkpoints"
        self.best = float("inf")
        self._due = False
        self._is_best = False

    def state_dict(self) -> dict[str, Any]:
        """The best validation loss so far, so that a resumed run goes on comparing with it, and the ledger's length."""
        return {"best": self.best, "points": self.ledger.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.best = float(state_dict["best"])

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the batch that was fetched but not begun out of Lightning's count.

        A resumed run fetches it again; counted twice, it would move every later validation one batch forward.
        """
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for count in (progress["total"], progress["current"]):
            count["ready"] = count["completed"]

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Note that a checkpoint is due. The first, before training, shows at once whether there is room for it."""
        if trainer.state.fn != "fit":
            return
        self._due = True
        loss = float(pl_module.val_metrics["val/loss"])
        if loss < self.best and not trainer.sanity_checking:
            self.best, self._is_best = loss, True

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save what the last validation asked for."""
        if self._due:
            self.save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Save the end of training, from which the final validation can be repeated."""
        self.save(trainer)

    def save(self, trainer: lightning.Trainer) -> None:
        """Save ``last`` now. Killed at any moment in here, the run goes on from the checkpoint before."""
        self._due = False
        if trainer.global_step == 0 and is_sharded(trainer.lightning_module):
            return  # asked for its state before its first step, a cut-up optimiser makes one, and counts it ever after
        temporary = self.folder / "saving.tmp"
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.ledger.flush()
        trainer.save_checkpoint(temporary)
        if not trainer.is_global_zero:
            return
        # The best first: a kill in between must not leave a checkpoint that remembers a best which is not there.
        if self._is_best:
            self._is_best = False
            _replace_by_link(temporary, self.folder / BEST)
        last = self.folder / LAST
        if last.exists():
            last.replace(self.folder / PREVIOUS)
        temporary.replace(last)
        flush_folder(self.folder)


def _replace_by_link(source: Path, target: Path) -> None:
    link = target.with_suffix(".tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(source, link)
    except OSError:  # not every file system has links
        shutil.copyfile(source, link)
    link.replace(target)


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names, where the file system can say so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without unpickling code.

    Raises:
        UserError: it is missing, cut short, damaged, or no checkpoint of ours.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not hold the archive's checksums against its content
            damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{path} is damaged: the checksum of {damaged} does not fit")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged archive raises whatever its reader stumbles over
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is damaged or no checkpoint: {reason}") from error
    if not isinstance(content, dict) or Checkpoints.__name__ not in content.get("callbacks", {}):
        raise UserError(f"{path} is no checkpoint of a run")
    return content


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: its file, its step, how many points the ledger held, and the weights."""

    path: Path
    step: int
    points: int
    state: dict[str, Any]


def read_saved(path: Path) -> Saved:
    """Read one checkpoint; errors as for ``load_checkpoint``."""
    content = load_checkpoint(path)
    points = int(content["callbacks"][Checkpoints.__name__]["points"])
    return Saved(path, int(content["global_step"]), points, content["state_dict"])


def newest_checkpoint(run_dir: Path, say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that can be read; None when a run has none yet.

    A damaged file is named through ``say``, and the one before it is used.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """
    problems = []
    for name in (LAST, PREVIOUS):
        path = run_dir / "checkpoints" / name
        if not path.exists():
            continue
        try:
            saved = read_saved(path)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"{problem}; using {path} (step {saved.step}) instead")
        return saved
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
