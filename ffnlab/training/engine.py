"""Lightning's arguments: which are the user's, which are governed by the run."""

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ffnlab.config import RunConfig
from ffnlab.errors import UserError
from ffnlab.training.batches import Cut
from ffnlab.training.parallel import make_strategy


def on_gpu(arguments: Mapping[str, Any]) -> bool:
    """Whether a run with these arguments of Lightning's trains on a GPU."""
    return arguments.get("accelerator", "auto") in ("gpu", "cuda", "auto") and torch.cuda.is_available()


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
    parts = arguments.get("accumulate_grad_batches", 1)
    devices = arguments.get("devices", 1)
    if isinstance(devices, int) and not isinstance(devices, bool) and (devices == 0 or devices < -1):
        raise UserError(f"trainer.devices must be positive, or -1 for all there are, not {devices}")
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise UserError(f"trainer.accumulate_grad_batches must be a positive whole number, not {parts!r}")
    nodes = arguments.get("num_nodes", 1)
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise UserError(f"trainer.num_nodes must be a positive whole number, not {nodes!r}")
    if nodes > 1 and not any(name in os.environ for name in _LAUNCHERS):
        raise UserError(
            f"trainer.num_nodes={nodes} needs the other nodes to be started too, by srun or torchrun, or by hand with "
            "MASTER_ADDR, MASTER_PORT and NODE_RANK set on each: without them this one would wait for ever"
        )
    strategy = arguments.get("strategy", "auto")
    if not isinstance(strategy, str) or any(word in strategy for word in ("spawn", "fork", "notebook")):
        raise UserError(
            f"trainer.strategy={strategy} is not for a run that a command starts; use ddp for several processes"
        )
    shares = 1 if arguments.get("strategy") == "model_parallel" else n_processes(arguments)
    Cut(cfg.train.batch_size, parts, shares, 0)  # refuses a batch that cannot be shared out evenly
    if arguments.get("precision") == "auto":
        arguments["precision"] = "bf16-mixed" if on_gpu(arguments) else "32-true"
    if str(arguments.get("precision")) in ("16", "16-mixed", "16-true"):
        raise UserError("trainer.precision=16 skips steps in silence while its loss scale adapts; use bf16-mixed")
    if arguments.get("strategy") == "fsdp" and not on_gpu(arguments):
        raise UserError("trainer=fsdp needs GPUs; on the CPU use trainer=ddp or trainer=model_parallel")
    _try(arguments)
    if arguments.get("profiler") is None:
        arguments["profiler"] = Unprofiled()
    return arguments


class Unprofiled(PassThroughProfiler):
    """Measures nothing, at no cost: Lightning enters some seventy profiled sections in every step."""

    _nothing = contextlib.nullcontext()

    def profile(self, action_name: str) -> Any:
        """One context for all sections."""
        return self._nothing


def n_processes(arguments: dict[str, Any]) -> int:
    """How many processes these arguments ask for; 1 where Lightning finds the devices itself."""
    devices = arguments.get("devices", 1)
    local = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) and devices > 0 else 1
    return local * int(arguments.get("num_nodes", 1))


def _try(arguments: dict[str, Any]) -> None:
    """Let Lightning look at the arguments before anything is written."""
    strategy = make_strategy(arguments.get("strategy", "auto"), n_processes(arguments))
    try:
        lightning.Trainer(**arguments | {"strategy": strategy}, logger=False, **_SILENT)
    except (MisconfigurationException, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"lightning.Trainer refuses trainer.*: {first}") from error


# One of them is there in every process that a launcher of several nodes starts.
_LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_SILENT: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}

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
    "limit_train_batches": "use train.tokens",
    "fast_dev_run": "use train.tokens",
    "overfit_batches": "use train.tokens, and data.paths for a small text",
    "barebones": "it would log and save nothing",
    "use_distributed_sampler": "batches are shared out by their step",
    "default_root_dir": "use hydra.run.dir",
    "plugins": "checkpoints are written by the run",
    "enable_progress_bar": "it has its own",
    "enable_model_summary": "it has its own",
    "enable_checkpointing": "it has its own",
    "num_sanity_val_steps": "the first validation is whole",
    "limit_val_batches": "use train.val_tokens",
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
