"""Reading a run back from its directory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ffnlab.config import RunConfig, from_plain
from ffnlab.data import Data
from ffnlab.errors import UserError
from ffnlab.model import LanguageModel
from ffnlab.training.checkpoints import BEST, load_weights, newest_checkpoint, read_saved
from ffnlab.training.ledger import read_json
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
    saved = read_saved(run_dir / "checkpoints" / BEST) if best else newest_checkpoint(run_dir, log.warning)
    if saved is None:
        raise UserError(f"{run_dir} has no checkpoint yet")
    load_weights(prepared.network, saved.state, saved.path)
    return LoadedRun(cfg, prepared.network.eval(), prepared.data, record, saved.path)
