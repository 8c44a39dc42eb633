"""Hydra's composition, outside ``@hydra.main``, with its errors in words."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from ffnlab.arguments import as_names
from ffnlab.call import CONF, quoted
from ffnlab.errors import UserError
from ffnlab.mistakes import Typed, in_words

# Our launchers' YAML files bear the names of the plugins' own on purpose: `hydra/launcher=joblib` is what people type.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")

CONFIG_NAME = "train"


def fresh_run_name(block: str, seed: int) -> str:
    """A directory name that reads well, sorts by time and does not collide: ``20261130-081500-swiglu-s3-9f2c``."""
    import secrets
    from datetime import datetime

    block = re.sub(r"[^\w.-]+", "-", block)
    return f"{datetime.now():%Y%m%d-%H%M%S}-{block}-s{seed}-{secrets.token_hex(2)}"


# Cached: Hydra asks for its run directory more than once, and the answer must not change within a process.
OmegaConf.register_new_resolver("fresh_run_name", fresh_run_name, use_cache=True, replace=True)


def cells_at_once() -> int:
    """As many as there are GPUs, or CPU cores that this process may use, with 2 GB of memory for each."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores(), memory // (2 * 1024**3)))


def cores() -> int:
    """CPU cores that this process may use: containers and ``taskset`` allow fewer than there are."""
    from joblib import cpu_count

    return int(cpu_count())


def d_ff_at_depth(d_model: int, n_layers: int, reference_layers: int) -> int:
    """Width of a dense block with which ``n_layers`` layers weigh what ``reference_layers`` do at ``d_ff = 4 d_model``.

    Attention has 4 d_model^2 weights a layer and the FFN 2 d_model d_ff: 12 d_model^2 a layer of the reference.
    """
    return round((12 * reference_layers / n_layers - 4) / 2 * d_model)


OmegaConf.register_new_resolver("d_ff_at_depth", d_ff_at_depth, replace=True)
OmegaConf.register_new_resolver("cells_at_once", cells_at_once, use_cache=True, replace=True)


@dataclass(frozen=True)
class Job:
    """One composed run: the configuration without Hydra's own section, and the choice made in each group.

    ``sweeps``: the overrides of several runs that an experiment preset brings along.
    """

    cfg: DictConfig
    choices: dict[str, str]
    run_dir: str
    sweeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Several runs, as one command asks for them.

    ``master`` is the configuration with Hydra's own section, ``jobs`` the overrides of each run, ``typed`` the
    overrides as given, without Hydra's own.
    """

    master: DictConfig
    jobs: list[list[str]]
    typed: list[str]
    context: HydraContext


def compose_job(overrides: list[str], config_dir: str | None = None) -> Job:
    """Compose one run from ``overrides`` as typed on the command line.

    Raises:
        UserError: an unknown choice, a misspelt key, a sweep without ``-m``, an override that does not parse.
    """
    overrides = as_names(overrides)
    with in_words(_typed(overrides, config_dir)):
        cfg = _compose(overrides, config_dir)
        # hydra.run.dir looks into the hydra section from the root, so it is resolved before the section goes.
        run_dir = str(cfg.hydra.run.dir)
    choices = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items()}
    _check_names(choices, config_dir)
    sweeps = _preset_sweep(cfg)
    with _unlocked(cfg):
        del cfg["hydra"]
    return Job(cfg, choices, run_dir, tuple(sweeps))


def compose_sweep(overrides: list[str], config_dir: str | None = None) -> Sweep:
    """Take a sweep apart with Hydra's own parser and sweeper: ``ffn=relu,gelu seed=range(3)``, and a preset's sweep.

    What is typed wins over the preset.

    Raises:
        UserError: as ``compose_job``.
    """
    overrides = as_names(overrides)
    with in_words(_typed(overrides, config_dir)), _initialized():
        loader = GlobalHydra.instance().config_loader()
        extra = _searchpath(config_dir)
        master = loader.load_configuration(CONFIG_NAME, extra + overrides, run_mode=RunMode.MULTIRUN)
        # Unresolved: a ${...} in it belongs to the run, and \${...} stays a name.
        typed: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*_preset_sweep(master), *typed])
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
        return Sweep(master, jobs, typed, HydraContext(config_loader=loader, callbacks=Callbacks(master)))


def _preset_sweep(cfg: DictConfig) -> list[str]:
    return [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]


def _compose(overrides: list[str], config_dir: str | None) -> DictConfig:
    with _initialized():
        return compose(CONFIG_NAME, overrides=_searchpath(config_dir) + overrides, return_hydra_config=True)


def _typed(overrides: list[str], config_dir: str | None) -> Typed:
    folders = [CONF, *([Path(config_dir)] if config_dir else [])]
    return Typed(overrides, folders, lambda others: _compose(others, config_dir))


def _check_names(choices: dict[str, str], config_dir: str | None) -> None:
    """Hydra takes our file where a choice of the user's has the same name, and would not say so."""
    for group, choice in choices.items() if config_dir else ():
        ours, theirs = (folder / group / f"{choice}.yaml" for folder in (CONF, Path(str(config_dir))))
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            raise UserError(f"{group}={choice} is one of ffnlab's own, which would be taken: rename {theirs}")


def _searchpath(config_dir: str | None) -> list[str]:
    if not config_dir:
        return []
    if not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: there is no such folder")
    return [f"hydra.searchpath=[{quoted(f'file://{Path(config_dir).resolve()}')}]"]


@contextmanager
def _initialized() -> Iterator[None]:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3", job_name=CONFIG_NAME):
            yield
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def _unlocked(cfg: DictConfig) -> Iterator[None]:
    OmegaConf.set_struct(cfg, False)
    OmegaConf.set_readonly(cfg, False)
    yield
    OmegaConf.set_struct(cfg, True)
