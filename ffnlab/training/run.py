"""One run, from a configuration to its result.

config -> data -> block factory -> ``d_ff`` from the budget -> network -> initialise -> LightningModule -> Trainer
-> result.
"""

import contextlib
import errno
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from ffnlab.budget import Budget, solve
from ffnlab.config import RunConfig, from_plain, to_plain
from ffnlab.data import Data, prepare
from ffnlab.errors import UserError
from ffnlab.ffn import locate, make_block
from ffnlab.model import LanguageModel, build, shared_init_hash
from ffnlab.training.batches import Cut, TrainStream, ValStream, loader, order_hash
from ffnlab.training.checkpoints import BEST, FINAL, LAST, Checkpoints, load_checkpoint, load_weights, newest_checkpoint
from ffnlab.training.environment import code_fingerprint, command, git_state, hardware, versions
from ffnlab.training.face import parameters_by_part, run_table, say_result
from ffnlab.training.guard import Diverged
from ffnlab.training.interruption import Interrupted, Interruption
from ffnlab.training.ledger import Ledger, read_json
from ffnlab.training.metrics import Curves, DropoutStream
from ffnlab.training.module import LMModule
from ffnlab.training.progress import ProgressLine
from ffnlab.training.wandb_view import close_wandb, open_wandb


@dataclass(frozen=True)
class Prepared:
    """What a run needs before its first step: data, sizes, an initialised network."""

    data: Data
    budget: Budget
    network: LanguageModel
    n_steps: int
    tokens_per_step: int
    flops_per_token: int
    hashes: dict[str, str]


def prepare_run(cfg: RunConfig) -> Prepared:
    """Prepare the data, solve the budget, build and initialise the network. Writes nothing but the token cache.

    Raises:
        UserError: data that cannot be read, a budget that cannot be met, a length shorter than one batch.
    """
    factory = make_block(cfg.ffn.target, cfg.ffn.options)
    budget = solve(
        factory, cfg.model.d_model, cfg.budget.kind, cfg.budget.multiple_of, cfg.budget.tolerance, cfg.budget.d_ff
    )
    data: Data = prepare(cfg.data, cfg.model.context_length)
    tokens_per_step = cfg.train.batch_size * data.context_length
    n_steps = cfg.train.tokens // tokens_per_step
    if n_steps < 1:
        raise UserError(
            f"train.tokens={cfg.train.tokens} is less than one batch of {tokens_per_step} tokens "
            f"(train.batch_size {cfg.train.batch_size} x context {data.context_length})"
        )
    network = build(cfg.model, data.vocab_size, factory, budget.d_ff, cfg.init_seed, cfg.ffn.down_init)
    network.checkpoint_blocks = cfg.train.checkpoint_blocks
    hashes = {
        "data": data.hash,
        "batches": order_hash(data, cfg.data_seed, cfg.train.batch_size, n_steps),
        "shared_init": shared_init_hash(network),
    }
    return Prepared(data, budget, network, n_steps, tokens_per_step, count_flops(cfg, data, budget), hashes)


def count_flops(cfg: RunConfig, data: Data, budget: Budget) -> int:
    """FLOPs per token of a training step at full context: the forward pass counted on the meta device, times three."""
    factory = make_block(cfg.ffn.target, cfg.ffn.options)
    with torch.device("meta"):
        twin = LanguageModel(cfg.model, data.vocab_size, lambda: factory(cfg.model.d_model, budget.d_ff))
        tokens = torch.zeros(1, data.context_length, dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            twin(tokens)
    return 3 * int(counter.get_total_flops()) // data.context_length


def trainer_arguments(cfg: RunConfig) -> dict[str, Any]:
    """``trainer.*`` with ``precision=auto`` decided, and nothing in it that the run itself governs.

    Raises:
        UserError: an argument that Lightning does not know, or one that the run sets itself.
    """
    import inspect

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


def train(
    cfg: RunConfig,
    run_dir: Path | str | None = None,
    resume: bool = False,
    console: Console | None = None,
    callbacks: Sequence[lightning.Callback] = (),
) -> dict[str, float]:
    """Train one configuration and return its result.

    Args:
        cfg: from ``ffnlab.config.compose`` or ``from_plain``.
        run_dir: where the ledger goes; a fresh directory under ``outputs/`` if left out.
        resume: go on from ``run_dir``'s newest checkpoint.
        console: where a person reads along; ``Console(quiet=True)`` for silence.
        callbacks: more Lightning callbacks.

    Returns:
        The content of ``result.json``: final validation loss (whole set), bits per byte, time, throughput.

    Raises:
        UserError: before anything is written: bad values, bad data, a budget that cannot be met.
        Diverged: a loss or gradient was not finite; the ledger says where.
        Interrupted: a signal came; a checkpoint was saved.
    """
    _quiet_libraries()
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    console = console if console is not None and first else Console(quiet=not first)
    arguments = trainer_arguments(cfg)
    run_dir = _run_dir(cfg, run_dir)
    _check_writable(run_dir)
    prepared = prepare_run(cfg)
    if resume and (run_dir / "result.json").exists():
        console.print(f"{run_dir} is finished already", highlight=False, soft_wrap=True)
        return {k: v for k, v in read_json(run_dir / "result.json").items() if v is not None}

    checkpoint: tuple[Path, int] | None = None
    if not first:
        ledger = Ledger(run_dir, prepared.tokens_per_step)
        checkpoint = newest_checkpoint(run_dir) if resume else None
    elif resume:
        _check_same(run_dir, prepared)
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint:
            load_weights(prepared.network, load_checkpoint(checkpoint[0])["state_dict"], checkpoint[0])
        ledger = Ledger.reopen(run_dir, prepared.tokens_per_step, checkpoint[1] if checkpoint else -1)
    else:
        ledger = Ledger.create(run_dir, prepared.tokens_per_step, to_plain(cfg), _record(cfg, prepared))

    parameters = parameters_by_part(prepared.network)
    console.print(
        run_table(
            cfg, prepared.budget, parameters, prepared.flops_per_token, prepared.n_steps, prepared.tokens_per_step
        )
    )
    if checkpoint:
        console.print(f"going on from step {checkpoint[1]} ({checkpoint[0].name})", highlight=False)

    wandb_logger: WandbLogger | None = None
    result: dict[str, float] = {}
    try:
        if first:
            run_id = ledger.record.get("wandb_id")
            wandb_logger = open_wandb(cfg, run_dir, prepared.tokens_per_step, console, run_id)
            if wandb_logger is not None and run_id is None:
                ledger.update(wandb_id=wandb_logger.experiment.id)
        result = _fit(cfg, prepared, ledger, wandb_logger, arguments, checkpoint, console, callbacks)
    except BaseException as error:
        _record_failure(ledger, error)
        raise
    finally:
        close_wandb(wandb_logger, result, failed=not result)
    if first:
        ledger.finish(result)
        wandb_dir = Path(wandb_logger.experiment.settings.sync_dir) if wandb_logger is not None else None
        say_result(console, cfg, run_dir, result, wandb_dir)
    return result


def _fit(
    cfg: RunConfig,
    prepared: Prepared,
    ledger: Ledger,
    wandb_logger: WandbLogger | None,
    arguments: dict[str, Any],
    checkpoint: tuple[Path, int] | None,
    console: Console,
    callbacks: Sequence[lightning.Callback],
) -> dict[str, float]:
    module = LMModule(prepared.network, cfg.optim, prepared.n_steps, prepared.data.bytes_per_token)
    if cfg.train.compile:
        prepared.network.compile()
    torch.set_flush_denormal(True)
    checkpoints = Checkpoints(ledger.run_dir)
    curves = Curves(cfg.train.log_every, prepared.tokens_per_step, prepared.flops_per_token)
    interruption = Interruption(checkpoints.save)
    parts = int(arguments.get("accumulate_grad_batches", 1))
    trainer = lightning.Trainer(
        **arguments,
        max_steps=prepared.n_steps,
        max_epochs=-1,
        val_check_interval=cfg.train.val_every * parts,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # the validation before the first step; skipped on resume
        limit_val_batches=None,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(ledger.run_dir),
        logger=[ledger] if wandb_logger is None else [ledger, wandb_logger],
        # The order matters: stop and save before a step is seeded and taken.
        callbacks=[
            checkpoints,
            interruption,
            DropoutStream(cfg.seed),
            curves,
            ProgressLine(console, curves),
            *callbacks,
        ],
    )
    world, rank = trainer.world_size, trainer.global_rank
    cut = Cut(cfg.train.batch_size, parts, world, rank)
    stream = TrainStream(prepared.data, cfg.data_seed, cut, lambda: trainer.global_step)
    partly = ValStream(prepared.data, cfg.train.val_batch_size, cfg.train.val_tokens, world, rank)
    wholly = ValStream(prepared.data, cfg.train.val_batch_size, None, world, rank)
    with interruption:
        ledger.restart_clock()
        trainer.fit(
            module,
            loader(stream),
            loader(partly),
            ckpt_path=str(checkpoint[0]) if checkpoint else None,
            weights_only=True,
        )
        trainer.validate(module, loader(wholly), verbose=False)
    if trainer.is_global_zero:
        _save_weights(prepared.network, ledger.run_dir)
    seconds = ledger.seconds
    tokens = prepared.n_steps * prepared.tokens_per_step
    return {
        **module.val_metrics,
        "train/loss": curves.last.get("train/loss", float("nan")),
        "steps": float(prepared.n_steps),
        "tokens": float(tokens),
        "seconds": round(seconds, 3),
        "tokens_per_s": curves.mean_tokens_per_s,
        "flops": float(tokens * prepared.flops_per_token),
    }


def _save_weights(network: LanguageModel, run_dir: Path) -> None:
    from safetensors.torch import save_model

    temporary = run_dir / "checkpoints" / "final.tmp"
    save_model(network, str(temporary))
    temporary.replace(run_dir / "checkpoints" / FINAL)


def _run_dir(cfg: RunConfig, run_dir: Path | str | None) -> Path:
    from ffnlab.composition import fresh_run_name

    return Path(run_dir) if run_dir is not None else Path("outputs") / fresh_run_name(cfg.ffn.name, cfg.seed)


def _check_writable(run_dir: Path) -> None:
    """Refuse an unwritable place before minutes are spent; the nearest existing parent decides."""
    if any(character in str(run_dir.name) for character in "= "):
        raise UserError(f"the run directory's name '{run_dir.name}' must not hold '=' or spaces")
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the run directory {run_dir}: {place} is not a writable folder")


def _record(cfg: RunConfig, prepared: Prepared) -> dict[str, Any]:
    return {
        "block": cfg.ffn.name,
        "study": cfg.study,
        "seed": cfg.seed,
        "init_seed": cfg.init_seed,
        "data_seed": cfg.data_seed,
        "command": command(),
        "steps": prepared.n_steps,
        "tokens": prepared.n_steps * prepared.tokens_per_step,
        "flops_per_token": prepared.flops_per_token,
        "budget": prepared.budget.as_dict(),
        "parameters": parameters_by_part(prepared.network),
        "hashes": prepared.hashes,
        "code": code_fingerprint(locate(cfg.ffn.target)),
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(),
    }


def _check_same(run_dir: Path, prepared: Prepared) -> None:
    """A resumed run must be the same run."""
    recorded = read_json(run_dir / "run.json").get("hashes", {})
    for what, value in prepared.hashes.items():
        if recorded.get(what) != value:
            raise UserError(
                f"{run_dir} cannot go on: its {what.replace('_', ' ')} changed ({recorded.get(what)} then, {value} now)"
            )


def _record_failure(ledger: Ledger, error: BaseException) -> None:
    fields: dict[str, Any]
    if isinstance(error, Interrupted | KeyboardInterrupt):
        fields = {"status": "interrupted"}
    elif isinstance(error, Diverged):
        fields = {"status": "diverged", "diverged": error.as_dict(), "error": str(error)}
    else:
        fields = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):  # a full disk must not hide the first error
        ledger.update(**fields, seconds=round(ledger.seconds, 3))


def disk_message(error: OSError, run_dir: Path | str) -> str | None:
    """One line for a full disk or a file-size limit; None for other errors."""
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"{os.strerror(error.errno)} while writing to {run_dir}; its last checkpoint and ledger are whole"
    return None


def _quiet_libraries() -> None:
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


@dataclass(frozen=True)
class LoadedRun:
    """A finished or interrupted run, read back."""

    cfg: RunConfig
    network: LanguageModel
    data: Data
    record: dict[str, Any]
    source: Path


def load_config(run_dir: Path | str) -> RunConfig:
    """The configuration of a run.

    Raises:
        UserError: ``run_dir`` is no run directory, or its ``config.yaml`` is damaged.
    """
    path = Path(run_dir) / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run_dir} is no run directory: it has no config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} does not hold a configuration")
    return from_plain(values)


def load_run(run_dir: Path | str, best: bool = False) -> LoadedRun:
    """Read back a run: configuration, data and network in eval mode, from its last (or best) checkpoint.

    Raises:
        UserError: no run directory, no checkpoint, or one that does not fit.
    """
    run_dir = Path(run_dir)
    cfg = load_config(run_dir)
    record = read_json(run_dir / "run.json")
    prepared = prepare_run(cfg)
    source = run_dir / "checkpoints" / (BEST if best else LAST)
    load_weights(prepared.network, load_checkpoint(source)["state_dict"], source)
    return LoadedRun(cfg, prepared.network.eval(), prepared.data, record, source)
