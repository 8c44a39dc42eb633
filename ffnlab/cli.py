"""The command line of ``train.py``: Hydra's, with short errors and no half-made directories.

Nothing heavy is imported until a configuration has been composed, so that ``--help`` and a misspelt key answer at once.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ffnlab.arguments import contiguous, read_arguments, wants_text
from ffnlab.call import call, override
from ffnlab.composition import CONF, CONFIG_NAME, Job, compose_job
from ffnlab.errors import UserError
from ffnlab.run_dir import check_run_dir
from ffnlab.signals import Interrupted, Signals

FAILED = 1


def say_error(error: object) -> int:
    """Print a short message, a line for each thing to mend, and return the exit status of a failure."""
    print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
    return FAILED


def find_own_blocks() -> None:
    """A block of the user's own is found in the folder the command is typed in."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def guarded(run: Callable[[], int | None]) -> int:
    """Call a command's body: its exit status, with what a user can mend said shortly and without a stack trace."""
    find_own_blocks()
    try:
        return run() or 0
    except UserError as error:
        return say_error(error)


def main() -> int:
    """Run ``train.py``; returns the exit status."""
    try:
        return _main()
    except KeyboardInterrupt:  # while a configuration is composed: nothing was begun
        return 130
    except BrokenPipeError:
        if not _reader_left():
            raise
        with contextlib.suppress(OSError):  # 2>&1 | head
            print("stopped: what reads the output has ended; the same command goes on", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what it still holds when it ends
        return 128 + signal.SIGPIPE


def _reader_left() -> bool:
    """Whether it is the reader of this command's output that a broken pipe is about, and not one of a library's."""
    output = select.poll()
    output.register(1, 0)
    output.register(2, 0)
    return bool(output.poll(0))


def _main() -> int:
    find_own_blocks()
    try:
        args = read_arguments(sys.argv[1:])
        if not args.multirun:
            sys.argv[1:] = contiguous(sys.argv[1:], args.overrides)
        if wants_text(args):
            end_with_reader()
            if args.overrides and not (args.multirun or args.shell_completion):  # install=bash is no override
                compose_job(list(args.overrides), args.config_dir)  # for its short errors
            _hydra_main()
            return 0
    except UserError as error:
        return say_error(error)
    if args.multirun:
        return guarded(lambda: _study(args))
    studies: list[str] = []
    status = guarded(lambda: _first_look(args, studies))
    if status:
        return status
    if studies:
        return guarded(lambda: _study(args))
    _hydra_main()
    return 0


def end_with_reader() -> None:
    """End in silence when ``| head`` has read enough, as every Unix tool does; not for what has work to save."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _study(args: Any) -> int:
    """A study, or the one cell of it that a run with ``study=NAME`` is."""
    from ffnlab.study.runner import run_study

    try:
        return run_study(list(args.overrides), args.config_dir, several=bool(args.multirun))
    except KeyboardInterrupt:
        print("quit; the same command goes on", file=sys.stderr)
        return 130


def _first_look(args: Any, studies: list[str]) -> None:
    """Compose and check before Hydra makes a directory; notes the study that the run is a cell of."""
    from ffnlab.config import from_hydra

    job = compose_job(list(args.overrides), args.config_dir)
    resume = job.cfg.get("resume")
    if resume is not None and not str(resume).strip():
        raise UserError("resume= names no run directory")
    if resume:
        _resume_arguments(args.overrides, str(resume))
        return
    if job.sweeps:
        raise UserError(f"experiment={job.choices.get('experiment')} is a study of several runs: add -m")
    from_hydra(job.cfg, job.choices.get("ffn"))
    if not job.run_dir.strip():  # it would be the folder that the command was typed in
        raise UserError("hydra.run.dir= names no directory")
    check_run_dir(Path(job.run_dir))
    if job.cfg.get("study"):
        studies.append(str(job.cfg.study))


def _resume_arguments(overrides: list[str], run_dir: str) -> None:
    """A resumed run takes its configuration from its own directory; Hydra is pointed there.

    Raises:
        UserError: other overrides, which would make it another run.
    """
    allowed = ("resume=", "trainer", "logger", "hydra.")
    other = [o for o in overrides if not o.startswith(allowed)]
    if other:
        raise UserError(
            f"resume goes on with the configuration in {run_dir}; leave out {' '.join(other)}, or start a new run"
        )
    if not (Path(run_dir) / "config.yaml").is_file():
        if (Path(run_dir) / "study.json").is_file():
            raise UserError(f"resume={run_dir}: that is a study; it goes on when its command is run again")
        raise UserError(f"resume={run_dir}: that is no run directory, it has no config.yaml")
    check_run_dir(Path(run_dir))
    sys.argv.append(override("hydra.run.dir", run_dir))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)
def _hydra_main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.cwd, hydra_cfg.run.dir)  # runtime.output_dir would fill a ${...} in
    choices = {str(k): str(v) for k, v in hydra_cfg.runtime.choices.items()}
    status = run_job(Job(cfg, choices, str(run_dir)))
    if status:
        sys.exit(status)


def _drop_if_empty(run_dir: Path) -> bool:
    """Remove the directory that Hydra made a moment ago, and ``outputs`` with it, unless something is in it."""
    with contextlib.suppress(OSError):
        run_dir.rmdir()
        if not run_dir.is_absolute():  # below the folder that the command was typed in
            run_dir.parent.rmdir()
    return not run_dir.exists()


def run_job(job: Job) -> int:
    """Train one composed job and return the process's exit status."""
    run_dir = Path(job.run_dir)
    with contextlib.suppress(ValueError):  # a path relative to where the command was typed reads better
        run_dir = run_dir.relative_to(Path.cwd())
    try:
        with Signals() as signals:  # before libraries load, which takes seconds and must not be cut short
            return _run(job, run_dir, signals)
    except BaseException:
        _drop_if_empty(run_dir)
        raise


def _run(job: Job, run_dir: Path, signals: Signals) -> int:
    from ffnlab.config import from_hydra
    from ffnlab.training import Diverged, load_config, train
    from ffnlab.training.face import Terminal
    from ffnlab.training.interruption import requeue_under_slurm
    from ffnlab.training.loading import check_records
    from ffnlab.training.memory import memory_message
    from ffnlab.training.parallel import process_rank
    from ffnlab.training.run import disk_message

    resume = bool(job.cfg.resume)
    try:
        cfg = load_config(run_dir) if resume else from_hydra(job.cfg, job.choices.get("ffn"))
        if resume:
            check_records(run_dir)
        train(cfg, run_dir, resume=resume, console=Terminal(), signals=signals)
    except UserError as error:
        _drop_if_empty(run_dir)
        return say_error(error)
    except (Diverged, Interrupted) as error:
        if process_rank() > 0:
            return 0  # the first process has its say and its status; Lightning would kill it for ours
        if isinstance(error, Diverged):
            return say_error(f"{error}; see run.json in {run_dir}")
        if not _drop_if_empty(run_dir):
            print(f"{error}: saved; go on by: {call('train.py', override('resume', run_dir))}", file=sys.stderr)
        requeue_under_slurm(error.signum)
        return error.exit_code
    except OSError as error:
        message = disk_message(error, run_dir)
        if message is None:
            raise
        return say_error(message)
    except (RuntimeError, MemoryError) as error:
        message = memory_message(error)
        if message is None:
            raise
        return say_error(f"{message}; the run is in {run_dir}")
    return 0
