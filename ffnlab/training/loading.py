"""Reading a run back from its directory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffnlab import records
from ffnlab.config import RunConfig, from_plain
from ffnlab.data import Data
from ffnlab.errors import UserError
from ffnlab.model import LanguageModel
from ffnlab.training.checkpoints import BEST, load_weights, newest_checkpoint, read_saved
from ffnlab.training.preparation import prepare_run

log = logging.getLogger(__name__)


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
    if not path.exists():
        raise UserError(f"{run_dir} is no run directory: it has no config.yaml")
    values = records.read(path)
    try:
        return from_plain(values)
    except UserError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def check_records(run_dir: Path) -> None:
    """Refuse to go on from a run whose ``run.json`` or ``result.json`` is damaged.

    Raises:
        UserError: names the file, the key, and what to do.
    """
    for name, advice in (("run.json", "put it back or start a new run"), ("result.json", "remove it, then resume")):
        if (run_dir / name).exists():
            try:
                records.read(run_dir / name)
            except UserError as error:
                raise UserError(f"{error}; {advice}") from error


def load_run(run_dir: Path | str, best: bool = False) -> LoadedRun:
    """Read back a run: configuration, data and network in eval mode, from its last (or best) checkpoint.

    Raises:
        UserError: no run directory, no checkpoint, or one that does not fit.
    """
    run_dir = Path(run_dir)
    cfg = load_config(run_dir)
    record = records.read(run_dir / "run.json")
    prepared = prepare_run(cfg)
    saved = read_saved(run_dir / "checkpoints" / BEST) if best else newest_checkpoint(run_dir, log.warning)
    if saved is None:
        raise UserError(f"{run_dir} has no checkpoint yet")
    load_weights(prepared.network, saved.state, saved.path)
    return LoadedRun(cfg, prepared.network.eval(), prepared.data, record, saved.path)
