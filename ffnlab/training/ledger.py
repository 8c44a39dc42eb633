"""What a run leaves behind: ``config.yaml``, ``run.json``, ``metrics.jsonl``, ``result.json``.

The ledger is the truth and W&B a view of it. Whole files are replaced atomically; the one file that grows gets whole
lines, and a line that a crash or a full disk cut short is taken back.
"""

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from ffnlab import records
from ffnlab.errors import UserError

LOCK = ".lock"


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: after a crash it holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def create_exclusively(path: Path, text: str) -> None:
    """Create ``path`` with its whole content at once; of two processes that try, one gets FileExistsError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_atomically(draft, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # not every file system has links
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    finally:
        draft.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Let no second process write in ``run_dir``, which is made; the system lets go of it however this one ends.

    Raises:
        UserError: another process holds it, or it cannot be written.
    """
    lock = FileLock(run_dir / LOCK, thread_local=False)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is running {run_dir} now") from None
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error
    except NotImplementedError:  # not every file system has locks
        pass
    try:
        yield
    finally:
        lock.release()


def now() -> str:
    """The time in UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Ledger(Logger):
    """The records of one run directory, as a Lightning logger so that every callback can write through it.

    ``tokens_per_step`` turns a step into tokens; ``points`` counts the lines of ``metrics.jsonl``; ``elapsed`` is the
    time spent in earlier sittings of a resumed run.
    """

    def __init__(self, run_dir: Path, tokens_per_step: int) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.tokens_per_step = tokens_per_step
        self.record: dict[str, Any] = {}
        self.points = 0
        self.elapsed = 0.0
        self._started = time.perf_counter()

    # -- opening ---------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, run_dir: Path, tokens_per_step: int, config: dict[str, Any], record: dict[str, Any], claimed: bool = False
    ) -> "Ledger":
        """Begin a run's records. ``config.yaml`` claims the directory, and is whole from the moment it is there.

        ``claimed``: it is there, and a kill came before anything else was written.

        Raises:
            UserError: the directory holds a run already, or cannot be written.
        """
        ledger = cls(run_dir, tokens_per_step)
        ledger.record = {"status": "running", "created": now(), **record}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if not claimed:
                text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
                create_exclusively(run_dir / "config.yaml", text)
            ledger.update()
        except FileExistsError:
            raise UserError(f"{run_dir} holds a run already; go on with it by resume={run_dir}") from None
        except OSError as error:
            raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error
        return ledger

    @classmethod
    def reopen(cls, run_dir: Path, tokens_per_step: int, step: int, points: int) -> "Ledger":
        """Go on with a run's records after its first ``points`` points; later ones will be made again.

        ``step`` is that of the checkpoint the run goes on from, for the record.

        Raises:
            UserError: points that the checkpoint counted are gone.
        """
        ledger = cls(run_dir, tokens_per_step)
        ledger.record = records.read(run_dir / "run.json")
        kept = read_points(run_dir)[:points]
        if len(kept) < points:
            raise UserError(
                f"{run_dir}/metrics.jsonl can be read up to point {len(kept)}, and the checkpoint of step {step} comes "
                f"after point {points}: put the file back, or start a new run"
            )
        ledger.points = len(kept)
        ledger.elapsed = max((float(point.get("seconds", 0.0)) for point in kept), default=0.0)
        write_atomically(run_dir / "metrics.jsonl", "".join(dumps(point) + "\n" for point in kept))
        for key in ("error", "diverged"):
            ledger.record.pop(key, None)
        ledger.update(status="running", resumed=[*ledger.record.get("resumed", []), {"step": step, "at": now()}])
        return ledger

    @classmethod
    def join(cls, run_dir: Path, tokens_per_step: int) -> "Ledger":
        """The face of the records for a process that is not the first of its run: it writes nothing.

        Raises:
            UserError: the first process has not begun a run there within a minute.
        """
        patience = time.monotonic() + 60
        while not (run_dir / "run.json").exists():
            if time.monotonic() > patience:
                raise UserError(f"no run begins in {run_dir}; give every process the same hydra.run.dir=...")
            time.sleep(0.2)
        return cls(run_dir, tokens_per_step)

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Time spent on this run, over all its sittings."""
        return self.elapsed + time.perf_counter() - self._started

    def restart_clock(self) -> None:
        """Count seconds from here: setting up is over and training begins."""
        self._started = time.perf_counter()

    @rank_zero_only
    def update(self, **fields: Any) -> None:
        """Change fields of ``run.json``."""
        self.record.update(fields)
        write_atomically(self.run_dir / "run.json", dumps(self.record, indent=2) + "\n")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one point. The axes ``step``, ``tokens`` and ``seconds`` are added here."""
        at = int(step or 0)
        point = {"step": at, "tokens": at * self.tokens_per_step, "seconds": round(self.seconds, 3), **metrics}
        path = self.run_dir / "metrics.jsonl"
        line = (dumps(point) + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, line)
                while written < len(line):  # a disk that is nearly full takes a part, and then says so
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        self.points += 1

    def flush(self) -> None:
        """Wait until the disk has every point: a checkpoint that counts them is about to be written."""
        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    @rank_zero_only
    def finish(self, result: Mapping[str, float]) -> None:
        """The run is complete: write ``result.json`` and the status."""
        write_atomically(self.run_dir / "result.json", dumps(dict(result), indent=2) + "\n")
        self.update(status="finished", finished=now(), seconds=round(self.seconds, 3))

    # -- Lightning's side ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Lightning asks; the directory says it."""
        return self.run_dir.name

    @property
    def version(self) -> str:
        """Lightning asks; there is one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: ``config.yaml`` was written before training."""


def finished_result(run_dir: Path) -> dict[str, float] | None:
    """The result of a run that is complete; its status is put right if a kill came between the two files."""
    if not (run_dir / "result.json").exists():
        return None
    result = records.read(run_dir / "result.json")
    record = records.read(run_dir / "run.json")
    if record.get("status") != "finished":
        write_atomically(run_dir / "run.json", dumps(record | {"status": "finished"}, indent=2) + "\n")
    return {key: value for key, value in result.items() if value is not None}


def _counts(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def read_points(run_dir: Path) -> list[dict[str, Any]]:
    """The points of ``metrics.jsonl``, up to a line that was cut short or damaged."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    points = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            point = json.loads(line)
        except json.JSONDecodeError:
            break  # a torn tail; nothing after it can be trusted
        axes = {"step": None, "tokens": 0, "seconds": 0}
        if not isinstance(point, dict) or not all(_counts(point.get(axis, usual)) for axis, usual in axes.items()):
            break
        points.append(point)
    return points
