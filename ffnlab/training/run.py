"""One run, from a configuration to its result.

config -> data -> block factory -> ``d_ff`` from the budget -> network -> initialise -> LightningModule -> Trainer
-> result.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.console import Console

from ffnlab import records
from ffnlab.census import NonFiniteError
from ffnlab.census.callback import CensusCallback
from ffnlab.composition import fresh_run_name
from ffnlab.config import RunConfig, to_plain
from ffnlab.data import TextTokens
from ffnlab.errors import UserError
from ffnlab.ffn import locate
from ffnlab.run_dir import check_run_dir
from ffnlab.signals import Interrupted, Signals
from ffnlab.training.allocator import keep_freed_memory
from ffnlab.training.batches import Cut, TrainStream, ValStream
from ffnlab.training.checkpoints import (
    FINAL,
    Checkpoints,
    FlushedFiles,
    Saved,
    load_weights,
    newest_checkpoint,
    write_flushed,
)
from ffnlab.training.copy_task import CopyTaskFailed, CopyTaskGoal, not_finite
from ffnlab.training.engine import n_processes, quiet_libraries, trainer_arguments
from ffnlab.training.environment import (
    code_fingerprint,
    command,
    git_state,
    hardware,
    package_fingerprint,
    versions,
)
from ffnlab.training.face import parameters_by_part, run_table, say_result
from ffnlab.training.guard import Diverged
from ffnlab.training.interruption import Interruption
from ffnlab.training.ledger import Ledger, alone_in, finished_result
from ffnlab.training.metrics import Curves, DropoutStream
from ffnlab.training.module import LMModule
from ffnlab.training.parallel import check_cut, data_share, lent_environment, make_strategy, process_rank
from ffnlab.training.preparation import Prepared, prepare_run
from ffnlab.training.progress import ProgressLine
from ffnlab.training.wandb_view import StepAxes, close_wandb, open_wandb


def train(
    cfg: RunConfig,
    run_dir: Path | str | None = None,
    resume: bool = False,
    console: Console | None = None,
    callbacks: Sequence[lightning.Callback] = (),
    signals: Signals | None = None,
) -> dict[str, float]:
    """Train one configuration and return its result.

    Args:
        cfg: from ``ffnlab.config.compose`` or ``from_plain``.
        run_dir: where the ledger goes; a fresh directory under ``outputs/`` if left out.
        resume: go on from ``run_dir``'s newest checkpoint.
        console: where a person reads along; ``Console(quiet=True)`` for silence.
        callbacks: more Lightning callbacks.
        signals: where the caller has taken over the process's signals already; otherwise the run does.

    Returns:
        The content of ``result.json``: final validation loss (whole set), bits per byte, time, throughput.

    Raises:
        UserError: before anything is written: bad values, bad data, a budget that cannot be met.
        Diverged: a loss or gradient was not finite; the ledger says where.
        Interrupted: a signal came; a checkpoint was saved.
    """
    quiet_libraries()
    first = process_rank() == 0
    console = console if console is not None and first else Console(quiet=not first)
    run_dir = Path(run_dir) if run_dir is not None else Path("outputs") / fresh_run_name(cfg.ffn.name, cfg.seed)
    check_run_dir(run_dir)
    with contextlib.nullcontext(signals) if signals else Signals() as signals, lent_environment(), ExitStack() as held:
        return _train(cfg, run_dir, resume, console, callbacks, signals, held)


def _train(
    cfg: RunConfig,
    run_dir: Path,
    resume: bool,
    console: Console,
    callbacks: Sequence[lightning.Callback],
    signals: Signals,
    held: ExitStack,
) -> dict[str, float]:
    first = process_rank() == 0

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    for is_held in (False, True) if resume and first else ():  # the process that ran it may finish it meanwhile
        if is_held:
            held.enter_context(alone_in(run_dir))
        if (finished := finished_result(run_dir)) is not None:
            say(f"{run_dir} is finished already")
            return finished
    with signals.at_once():
        arguments = trainer_arguments(cfg)
        prepared = prepare_run(cfg)
        if arguments.get("strategy") == "model_parallel":
            for block in prepared.network.blocks:
                check_cut(block.ffn, n_processes(arguments))
    ledger, checkpoint = _open_ledger(cfg, run_dir, prepared, resume, held, say)

    wandb_logger: StepAxes | None = None
    result: dict[str, float] = {}
    goal: CopyTaskGoal | None = None
    try:
        with signals.at_once():
            parameters = parameters_by_part(prepared.network)
            flops, steps, tokens = prepared.flops_per_token, prepared.n_steps, prepared.tokens_per_step
            console.print(run_table(cfg, prepared.budget, parameters, flops, steps, tokens))
            if checkpoint:
                say(f"going on from step {checkpoint.step} ({checkpoint.path.name})")
            if first:
                run_id = ledger.record.get("wandb_id")
                wandb_logger = open_wandb(cfg, run_dir, prepared.tokens_per_step, console, run_id)
                if wandb_logger is not None and run_id is None:
                    ledger.update(wandb_id=wandb_logger.experiment.id)
        if cfg.copy_task is not None:
            goal = CopyTaskGoal(cfg.copy_task, prepared.data, console)
            callbacks = [*callbacks, goal]
        result = _fit(cfg, prepared, ledger, wandb_logger, arguments, checkpoint, console, callbacks, signals)
        if goal is not None:
            result |= goal.result
        ledger.finish(result)  # takes a moment, and is done whatever signal comes
    except BaseException as error:
        _record_failure(ledger, error)
        if goal is not None and isinstance(error, Diverged):
            raise CopyTaskFailed(not_finite(error)) from error
        raise
    finally:
        close_wandb(wandb_logger, result, failed=not result)
    if first:
        wandb_dir = Path(wandb_logger.experiment.settings.sync_dir) if wandb_logger is not None else None
        say_result(console, run_dir, result, ledger.record.get("unigram_loss"), wandb_dir)
    return result


def _open_ledger(
    cfg: RunConfig, run_dir: Path, prepared: Prepared, resume: bool, held: ExitStack, say: Callable[[str], None]
) -> tuple[Ledger, Saved | None]:
    """The run's records, and the checkpoint that a resumed run goes on from, with its weights in the network."""
    if process_rank() > 0:
        ledger = Ledger.join(run_dir, prepared.tokens_per_step)
        return ledger, newest_checkpoint(run_dir, say) if resume else None
    if not resume:
        held.enter_context(alone_in(run_dir))
    if not resume or not (run_dir / "run.json").exists():
        record = _record(cfg, prepared)
        return Ledger.create(run_dir, prepared.tokens_per_step, to_plain(cfg), record, claimed=resume), None
    _check_same(run_dir, prepared)
    checkpoint = newest_checkpoint(run_dir, say)
    if checkpoint:
        load_weights(prepared.network, checkpoint.state, checkpoint.path)
    step, points = (checkpoint.step, checkpoint.points) if checkpoint else (0, 0)
    return Ledger.reopen(run_dir, prepared.tokens_per_step, step, points), checkpoint


def _fit(
    cfg: RunConfig,
    prepared: Prepared,
    ledger: Ledger,
    wandb_logger: StepAxes | None,
    arguments: dict[str, Any],
    checkpoint: Saved | None,
    console: Console,
    callbacks: Sequence[lightning.Callback],
    signals: Signals,
) -> dict[str, float]:
    module = LMModule(prepared.network, cfg.optim, prepared.n_steps, prepared.data.bytes_per_token)
    if cfg.train.compile:
        prepared.network.compile()
    keep_freed_memory()
    checkpoints = Checkpoints(ledger)
    census = CensusCallback(
        prepared.data, ledger.run_dir, cfg.census.tokens, cfg.census.final_tokens, title=ledger.run_dir.name
    )
    curves = Curves(cfg.train.log_every, prepared.tokens_per_step, prepared.flops_per_token)
    parts = int(arguments.get("accumulate_grad_batches", 1))
    trainer = lightning.Trainer(
        **arguments | {"strategy": make_strategy(arguments.get("strategy", "auto"), n_processes(arguments))},
        plugins=[FlushedFiles()],
        max_steps=prepared.n_steps,
        max_epochs=-1,
        val_check_interval=cfg.train.validation_interval(prepared.n_steps) * parts,
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
            Interruption(signals, checkpoints.save),
            DropoutStream(cfg.seed),
            census,
            curves,
            ProgressLine(console, curves),
            *callbacks,
        ],
    )
    world, rank = module.share = data_share(arguments, trainer)
    cut = Cut(cfg.train.batch_size, parts, world, rank)
    stream = TrainStream(prepared.data, cfg.data_seed, cut, lambda: trainer.global_step)
    partly = ValStream(prepared.data, cfg.train.val_batch_size, cfg.train.val_tokens, world, rank)
    wholly = ValStream(prepared.data, cfg.train.val_batch_size, None, world, rank)
    ledger.restart_clock()
    torch.set_flush_denormal(True)  # numbers too small to matter cost a CPU much time
    try:
        trainer.fit(
            module,
            stream,
            partly,
            ckpt_path=str(checkpoint.path) if checkpoint else None,
            weights_only=True,
        )
        # What comes now can be repeated, so a signal need not wait for its end; of several processes none stops alone.
        with signals.at_once() if trainer.world_size == 1 else contextlib.nullcontext():
            trainer.validate(module, wholly, verbose=False)
            weights = module.whole_network().state_dict()
            if trainer.is_global_zero:
                _save_weights(weights, ledger.run_dir)
    except NonFiniteError as error:
        lr = float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else cfg.optim.lr
        raise Diverged(trainer.global_step, f"{error.tensor} of layer {error.layer}", lr) from error
    except BaseException:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGTERM)
        raise
    finally:
        torch.set_flush_denormal(False)  # the process may have other work, with numbers of its own
    seconds = ledger.seconds
    steps = trainer.global_step  # fewer than n_steps where a goal was reached
    tokens = steps * prepared.tokens_per_step
    return {
        **module.val_metrics,
        **census.final,
        "train/loss": curves.last.get("train/loss", float("nan")),
        "steps": float(steps),
        "tokens": float(tokens),
        "seconds": round(seconds, 3),
        "tokens_per_s": curves.mean_tokens_per_s,
        "flops": float(tokens * prepared.flops_per_token),
    }


def _save_weights(weights: dict[str, torch.Tensor], run_dir: Path) -> None:
    """The final weights without anything around them; a tied head is the embedding and is not written twice."""
    from safetensors.torch import save

    if weights["head.weight"].data_ptr() == weights["token_embedding.weight"].data_ptr():
        del weights["head.weight"]
    temporary = run_dir / "checkpoints" / "final.tmp"
    write_flushed(temporary, save({name: tensor.contiguous() for name, tensor in weights.items()}))
    temporary.replace(run_dir / "checkpoints" / FINAL)


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
        "unigram_loss": prepared.data.unigram_loss() if isinstance(prepared.data, TextTokens) else None,
        "budget": prepared.budget.as_dict(),
        "parameters": parameters_by_part(prepared.network),
        "hashes": prepared.hashes,
        "code": code_fingerprint(locate(cfg.ffn.target)),
        "package_code": package_fingerprint(),
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(),
    }


def _check_same(run_dir: Path, prepared: Prepared) -> None:
    """A resumed run must be the same run."""
    recorded = records.read(run_dir / "run.json").get("hashes", {})
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
