"""Lightning's arguments: which are the user's, which are governed by the run."""

import inspect
import logging
import warnings
from typing import Any

import lightning
import torch

from ffnlab.config import RunConfig
from ffnlab.errors import UserError


def trainer_arguments(cfg: RunConfig) -> dict[str, Any]:
    """``trainer.*`` with ``precision=auto`` decided, and nothing in it that the run itself governs.

    Raises:
        UserError: an argument that Lightning does not know, or one that the run sets itself.
    """
    arguments = dict(cfg.trainer)
    known = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    for name in arguments:
        if name in _OWN_ARGUMENTS:
            raise UserError(f"trainer.{name} is set by the run itself: {_OWN_ARGUMENTS[name]}")
        if name not in known:
            raise UserError(f"lightning.Trainer has no argument '{name}'")
    on_gpu = arguments.get("accelerator") in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    if arguments.get("precision") == "auto":
        arguments["precision"] = "bf16-mixed" if on_gpu else "32-true"
    return arguments


_OWN_ARGUMENTS = {
    "max_steps": "use train.tokens",
    "max_epochs": "use train.tokens",
    "max_time": "use train.tokens",
    "gradient_clip_val": "use optim.grad_clip",
    "gradient_clip_algorithm": "use optim.grad_clip",
    "val_check_interval": "use train.val_every",
    "check_val_every_n_epoch": "use train.val_every",
    "logger": "use logger=...",
    "callbacks": "pass them to train()",
    "use_distributed_sampler": "batches are shared out by their step",
    "default_root_dir": "use hydra.run.dir",
}


def quiet_libraries() -> None:
    """Lightning's notices speak to programmers of Lightning; what concerns a user is said by the run."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for text in (
        ".*does not have many workers.*",
        ".*Consider setting.*pin_memory.*",
        ".*Your `IterableDataset` has `__len__` defined.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*you defined a `validation_step` but have no `val_dataloader`.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*was already called.*",
    ):
        warnings.filterwarnings("ignore", message=text)
