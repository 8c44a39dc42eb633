"""One run, from a configuration to its result.

config -> data -> block factory -> ``d_ff`` from the budget -> network -> initialise -> LightningModule -> Trainer
-> result.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console

from ffnlab.census import NonFiniteError
from ffnlab.census.callback import CensusCallback
from ffnlab.composition import fresh_run_name
from ffnlab.config import RunConfig, to_plain
from ffnlab.errors import UserError
from ffnlab.ffn import locate
from ffnlab.model import LanguageModel
from ffnlab.training.batches import Cut, TrainStream, ValStream, loader
from ffnlab.training.checkpoints import FINAL, Checkpoints, load_checkpoint, load_weights, newest_checkpoint
from ffnlab.training.engine import quiet_libraries, trainer_arguments
from ffnlab.training.environment import code_fingerprint, command, git_state, hardware, versions
from ffnlab.training.face import parameters_by_part, run_table, say_result
from ffnlab.training.guard import Diverged
from ffnlab.training.interruption import Interrupted, Interruption
from ffnlab.training.ledger import Ledger, read_json
from ffnlab.training.metrics import Curves, DropoutStream
from ffnlab.training.module import LMModule
from ffnlab.training.preparation import Prepared, prepare_run
from ffnlab.training.progress import ProgressLine
from ffnlab.training.wandb_view import close_wandb, open_wandb


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
    quiet_libraries()
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
    census = CensusCallback(
        prepared.data, ledger.run_dir, cfg.census.tokens, cfg.census.final_tokens, title=ledger.run_dir.name
    )
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
        # and the census before the curves, which count its time as validation.
        callbacks=[
            checkpoints,
            interruption,
            DropoutStream(cfg.seed),
            census,
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
        try:
            trainer.fit(
                module,
                loader(stream),
                loader(partly),
                ckpt_path=str(checkpoint[0]) if checkpoint else None,
                weights_only=True,
            )
            trainer.validate(module, loader(wholly), verbose=False)
        except NonFiniteError as error:
            lr = float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else cfg.optim.lr
            raise Diverged(trainer.global_step, f"{error.tensor} of layer {error.layer}", lr) from error
    if trainer.is_global_zero:
        _save_weights(prepared.network, ledger.run_dir)
    seconds = ledger.seconds
    tokens = prepared.n_steps * prepared.tokens_per_step
    return {
        **module.val_metrics,
        **census.final,
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
