"""A cell: one (configuration, seed) run of a study, its name, and the state its directory is in."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from ffnlab import records
from ffnlab.errors import UserError

# The state of a study is looked at while it runs, so that reading it must not cost an import of torch.
if TYPE_CHECKING:
    from ffnlab.config import RunConfig

Status = Literal["missing", "unfinished", "finished", "failed", "diverged"]

# Where and how a cell is computed and watched, not what: the same cell on another machine has the same name.
# Precision stays in: it changes what is computed.
MACHINE = {
    "trainer": ("accelerator", "devices", "strategy", "num_nodes", "accumulate_grad_batches"),
    "train": ("log_every", "val_every", "val_batch_size", "compile", "checkpoint_blocks"),
    "data": ("cache_dir",),
}
SEEDS = ("seed", "init_seed", "data_seed")
LOCKS, REPLACED = ".locks", ".replaced"


@dataclass(frozen=True)
class Cell:
    """One cell, composed: ``overrides`` are what was typed or swept for it."""

    name: str
    overrides: list[str]
    cfg: "RunConfig"


def identity(cfg: "RunConfig") -> dict[str, Any]:
    """The resolved configuration without machine and logging keys."""
    from ffnlab.config import to_plain

    values = to_plain(cfg)
    del values["logger"], values["study"]
    for section, keys in MACHINE.items():
        values[section] = {key: value for key, value in values[section].items() if key not in keys}
    return values


def configuration(cfg: "RunConfig") -> str:
    """A hash of what cells that differ in their seeds alone have in common."""
    return _hash({key: value for key, value in identity(cfg).items() if key not in SEEDS})


def cell_name(cfg: "RunConfig") -> str:
    """``swiglu-s3-1a2b3c4d``: the block, the seed, a hash of ``identity``."""
    block = re.sub(r"[^\w.-]+", "-", cfg.ffn.name)
    return f"{block}-s{cfg.seed}-{_hash(identity(cfg))[:8]}"


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class State:
    """What a cell's directory and the manifest say. ``damaged``: why the records that are there cannot be read."""

    status: Status
    record: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    damaged: str = ""

    @property
    def code(self) -> str:
        """Fingerprint of the code that the cell was started with."""
        return str(self.record.get("code") or "")

    @property
    def data(self) -> str:
        """Hash of the data that the cell was started with."""
        return str((self.record.get("hashes") or {}).get("data") or "")


def look(run_dir: Path, entry: dict[str, Any]) -> State:
    """The state of the cell in ``run_dir``; ``entry`` is its line in the manifest.

    A process that was killed leaves ``running`` in its record: without a result that means unfinished. A result whose
    loss is no number is a divergence.
    """
    damaged = ""
    record: dict[str, Any] = {}
    result: dict[str, Any] = {}
    try:
        if (run_dir / "run.json").exists():
            record = records.read(run_dir / "run.json")
        if record and (run_dir / "result.json").exists():
            result = records.read(run_dir / "result.json")
    except UserError as problem:
        damaged, record = str(problem), {}
    listed, own = entry.get("status"), record.get("status")
    error = str(entry.get("error") or record.get("error") or "")
    if result:
        loss = result["val/loss"]
        if loss is not None and math.isfinite(loss):
            return State("finished", record, result)
        return State("diverged", record, error=error or "its final validation loss is no number")
    if "diverged" in (listed, own):
        return State("diverged", record, error=error, damaged=damaged)
    if "failed" in (listed, own) and listed != "running":
        return State("failed", record, error=error, damaged=damaged)
    return State("unfinished" if record else "missing", record, damaged=damaged)


def cell_lock(study_dir: Path, name: str) -> FileLock:
    """Held by the process that runs the cell; the system lets go of it when that process ends, however it ends."""
    folder = study_dir / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", thread_local=False)


def is_running(study_dir: Path, name: str) -> bool:
    """Whether some process holds the cell."""
    if not (study_dir / LOCKS / f"{name}.lock").exists():
        return False
    try:
        with cell_lock(study_dir, name).acquire(timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def held(study_dir: Path, name: str) -> Iterator[None]:
    """Hold the cell, waiting for another process that runs it."""
    with cell_lock(study_dir, name).acquire(poll_interval=0.5):
        yield


def put_aside(study_dir: Path, name: str, seen: State) -> None:
    """Move a cell's directory out of the way, so that it starts afresh; nothing is deleted.

    Not if another process has it now, or has begun it afresh since it was ``seen``.
    """
    from ffnlab.training.ledger import now

    run_dir = study_dir / name
    try:
        with cell_lock(study_dir, name).acquire(timeout=0):
            if not run_dir.exists() or look(run_dir, {}).record.get("created") != seen.record.get("created"):
                return
            place = study_dir / REPLACED
            place.mkdir(exist_ok=True)
            stamp, number = re.sub(r"\W", "", now()), 0
            while (goal := place / f"{name}-{stamp}{f'-{number}' if number else ''}").exists():
                number += 1
            run_dir.rename(goal)
    except Timeout:
        return
