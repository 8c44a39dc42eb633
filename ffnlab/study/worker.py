"""One cell, run in whatever process a launcher chose. Nothing that goes wrong in it reaches the other cells."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from ffnlab.errors import UserError
from ffnlab.signals import Interrupted, Signals
from ffnlab.study import manifest
from ffnlab.study.cells import LOCKS, held, is_running, look
from ffnlab.study.resources import clean_torch, one_gpu

# Names that would make every run of a worker the same W&B run.
WANDB_IDENTITY = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_RUN_GROUP", "WANDB_SWEEP_ID")
WATCH_S = 0.5
REQUEUE_S = 120


@dataclass(frozen=True)
class Leader:
    """The process that was given the command."""

    host: str
    pid: int

    @classmethod
    def here(cls) -> "Leader":
        """This process."""
        return cls(socket.gethostname(), os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return self == Leader.here()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; assumed of a process on another machine."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@dataclass(frozen=True)
class CellTask:
    """Hydra's task function: runs the cell that its job is named after. Travels to workers by pickle."""

    study_dir: str
    configs: dict[str, dict[str, Any]]
    codes: dict[str, str]
    threads: int | None
    leader: Leader
    dies_with_leader: bool
    cwd: str
    argv: list[str]
    path: list[str]

    def __call__(self, _: Any) -> str:
        """The cell's status afterwards."""
        name = str(HydraConfig.get().sweep.subdir)
        if not self.leader.is_here:
            os.chdir(self.cwd)  # relative paths of the command's mean the same everywhere
            sys.argv = list(self.argv)
            sys.path.extend(folder for folder in self.path if folder not in sys.path)
            if self.dies_with_leader:
                _end_with(self.leader)
        with Signals(quiet=self.dies_with_leader) as signals:
            _in_cell.set()
            try:
                return self._run(name, signals)
            except Interrupted:  # while it waited
                return "interrupted"
            except Exception as error:  # a launcher would keep it to itself
                print(f"{name}: failed: {_in_words(error, Path(self.study_dir))}", file=sys.stderr, flush=True)
                return "failed"
            finally:
                _in_cell.clear()
                # Also after one that came when the cell was as good as finished. On a cluster each job is on its own.
                if signals.signum is not None and (self.dies_with_leader or self.leader.is_here):
                    ask_to_stop(Path(self.study_dir), self.leader, signals.signum)

    def _run(self, name: str, signals: Signals) -> str:
        study_dir = Path(self.study_dir)
        run_dir = study_dir / name
        if asked_to_stop(study_dir, self.leader):
            _drop_if_empty(run_dir)
            return "pending"
        if is_running(study_dir, name):
            say(f"{name}: waiting, another process is running it")
        with ExitStack() as stack:
            with signals.at_once():
                stack.enter_context(held(study_dir, name))
            entry = manifest.entries(study_dir)[name]
            state = look(run_dir, entry)
            if state.status == "finished":  # by a process that was waited for
                return record_finished(study_dir, name, state.record, state.result)
            if entry.get("status") in ("failed", "diverged"):  # by that process, too: `retry=true` runs it again
                return str(entry["status"])
            manifest.update_cell(study_dir, name, status="running", error=None, pid=os.getpid(), host=self.leader.host)
            return self._train(study_dir, name, signals)

    def _train(self, study_dir: Path, name: str, signals: Signals) -> str:
        import torch

        from ffnlab.config import from_plain
        from ffnlab.ffn import locate
        from ffnlab.training import Diverged, train
        from ffnlab.training.environment import code_fingerprint
        from ffnlab.training.face import Terminal
        from ffnlab.training.interruption import requeue_under_slurm

        run_dir = study_dir / name
        cfg = from_plain(self.configs[name])
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        status, error = "failed", None
        try:
            if code_fingerprint(locate(cfg.ffn.target)) != self.codes[name]:
                raise UserError("the code changed while the study ran; run the command again to see which cells differ")
            resume = (run_dir / "run.json").exists()
            say(f"{name}: {'goes on' if resume else 'starts'}")
            with _own_wandb_run(), one_gpu(cfg), clean_torch():
                # In a process of its own a cell shares the terminal with others: lines of ours instead of its table.
                train(cfg, run_dir, resume, Terminal(quiet=not self.leader.is_here), signals=signals)
            state = look(run_dir, {})
            return record_finished(study_dir, name, state.record, state.result)
        except Interrupted as stop:
            manifest.update_cell(study_dir, name, status="interrupted")
            say(f"{name}: stopped" if _drop_if_empty(run_dir) else f"{name}: stopped and saved")
            requeue_under_slurm(stop.signum)
            if not self.dies_with_leader and not self.leader.is_here and stop.signum == signal.SIGUSR1:
                time.sleep(REQUEUE_S)  # Slurm ends this sitting; returning would tell the command that it is over
            return "interrupted"
        except Diverged as divergence:
            status, error = "diverged", str(divergence)
        except UserError as mistake:
            error = str(mistake)
        except Exception as failure:
            error = _in_words(failure, run_dir)
        print(f"{name}: {status}: {error}", file=sys.stderr, flush=True)
        manifest.update_cell(
            study_dir, name, status=status, error=error, seconds=look(run_dir, {}).record.get("seconds")
        )
        return status


def record_finished(study_dir: Path, name: str, record: dict[str, Any], result: dict[str, Any]) -> str:
    """Put a finished cell's result into the manifest."""
    from ffnlab.training.ledger import dumps, write_atomically

    if record.get("status") != "finished":  # killed between its result and its last word
        record = {**record, "status": "finished", "seconds": result.get("seconds")}
        write_atomically(study_dir / name / "run.json", dumps(record, indent=2) + "\n")
    entries = manifest.entries(study_dir)
    if entries[name].get("status") != "finished" or entries[name].get("result") != result:
        fields = {"status": "finished", "seconds": result.get("seconds"), "result": result, "error": None}
        manifest.update_cell(study_dir, name, **fields)
        done = sum(entry.get("status") == "finished" for entry in entries.values()) + 1
        loss, seconds = result.get("val/loss"), result.get("seconds")
        left = _time_left(study_dir)
        say(f"{name}: val/loss {loss:.4f} after {seconds:.0f} s ({done} of {len(entries)} cells finished{left})")
    return "finished"


def _time_left(study_dir: Path) -> str:
    from ffnlab.study.progress import duration, survey, time_left

    with contextlib.suppress(UserError):  # a record that is damaged or being written: said elsewhere
        left = time_left(survey(study_dir))
        return "" if left is None else f", about {duration(left)} left"
    return ""


def _drop_if_empty(run_dir: Path) -> bool:
    """Remove the directory that Hydra made a moment ago, unless something is in it."""
    with contextlib.suppress(OSError):
        run_dir.rmdir()
    return not run_dir.exists()


def _in_words(error: Exception, folder: Path) -> str:
    """A failure that is being handled, in a line; one that is no full disk with its traceback before it."""
    from ffnlab.training.run import disk_message

    if isinstance(error, OSError) and (full := disk_message(error, folder)):
        return full
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def say(line: str) -> None:
    """One whole line, at once, among those of other processes. Nobody's leaving to read it stops a study."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


# -- stopping -------------------------------------------------------------------------------------------------------


def _stop_file(study_dir: Path, leader: Leader) -> Path:
    return study_dir / LOCKS / f"stop-{leader.host}-{leader.pid}"


def ask_to_stop(study_dir: Path, leader: Leader, signum: int) -> None:
    """Let no further cell of this command begin, because of this signal."""
    with contextlib.suppress(FileExistsError), _stop_file(study_dir, leader).open("x") as file:
        file.write(str(int(signum)))


def asked_to_stop(study_dir: Path, leader: Leader) -> int:
    """The signal because of which the command is to stop, or 0."""
    try:
        return int(_stop_file(study_dir, leader).read_text() or signal.SIGTERM)
    except FileNotFoundError:
        return 0


def forget_stop(study_dir: Path, leader: Leader) -> None:
    """Take the request back: the command is over."""
    _stop_file(study_dir, leader).unlink(missing_ok=True)


_watched: set[Leader] = set()
_in_cell = threading.Event()


def _end_with(leader: Leader) -> None:
    """Save and stop when the command is killed, so that nothing goes on behind the user's back."""
    if leader in _watched:  # the process has run a cell before
        return
    _watched.add(leader)

    def watch() -> None:
        while leader.is_alive:
            time.sleep(WATCH_S)
        if _in_cell.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves itself at the end of its step
        while _in_cell.is_set():
            time.sleep(WATCH_S / 10)
        os._exit(143)

    threading.Thread(target=watch, daemon=True, name="end-with-command").start()


# -- a worker that is used again -------------------------------------------------------------------------------------


@contextmanager
def _own_wandb_run() -> Iterator[None]:
    before = {key: os.environ.pop(key) for key in WANDB_IDENTITY if key in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
