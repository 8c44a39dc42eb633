"""Hydra's composition, outside ``@hydra.main``, with its errors turned into one or two sentences."""

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
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ffnlab.arguments import as_names
from ffnlab.call import CONF, quoted
from ffnlab.errors import UserError
from ffnlab.schema import nearest

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
    with _readable_errors(overrides, config_dir):
        cfg = _compose(overrides, config_dir)
        # hydra.run.dir looks into the hydra section from the root, so it is resolved before the section goes.
        run_dir = str(cfg.hydra.run.dir)
    choices = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items()}
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
    with _readable_errors(overrides, config_dir), _initialized():
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


@contextmanager
def _readable_errors(overrides: list[str], config_dir: str | None) -> Iterator[None]:
    try:
        yield
    except MissingConfigException as error:
        raise UserError(_unknown_choice(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_composition_error(error, overrides, config_dir)) from error
    except (AssertionError, AttributeError) as error:  # Hydra's answer to a key below one that is null
        if not (sweeps := [_as_typed(word) for word in overrides if "hydra.sweeper.params" in word]):
            raise
        raise UserError(f"hydra.sweeper.params is for experiment files: write -m {' '.join(sweeps)}") from error


def _as_typed(word: str) -> str:
    """``hydra.sweeper.params.seed="0,1"`` as a command line has it."""
    found = re.fullmatch(r"[+]*hydra\.sweeper\.params\.([\w.]+)=(['\"]?)(.*)\2", word)
    return f"{found[1]}={found[3]}" if found else "KEY=A,B"


def _unknown_choice(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file
    name = missing if isinstance(missing, str) else next(iter(missing or ()), "")
    group, _, choice = name.rpartition("/")
    options = [str(option) for option in error.options or []]
    if not options:
        return f"there is no configuration '{name}'"
    return f"{group}={choice} is unknown{nearest(choice, options)}; choose one of {', '.join(sorted(options))}"


def _composition_error(error: Exception, overrides: list[str], config_dir: str | None) -> str:
    text = f"{error}\n{error.__cause__ or ''}"
    if "multirun" in text:
        swept = [o for o in overrides if "," in o or "range(" in o or "choice(" in o]
        thousands = [
            n.replace(",", "_") for o in swept if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", n := o.partition("=")[2])
        ]
        meant = f"; for a number write {thousands[0]}" if thousands else ""
        return f"{' '.join(swept) or 'a list of values'} asks for several runs: add -m{meant}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        key = unknown.group(1)
        preset = next((o for o in overrides if o.lstrip("+").startswith("experiment=")), "")
        if preset and not any(o.lstrip("+~").startswith(key) for o in overrides):  # nobody typed it
            return f"{preset} does not go with the rest: it sets {key}, which is not there; leave out what it chooses"
        parent, _, leaf = key.rpartition(".")
        known = _keys(parent, config_dir, overrides)
        if parent and not known:
            top = _keys("", config_dir, [])
            return f"{parent} has no keys" if parent in top else f"there is no section '{parent}'{nearest(parent, top)}"
        if leaf in known:  # the key exists: its value did not fit
            return text.splitlines()[0]
        where = f"{parent} has" if parent else "there are"
        elsewhere = {k: choices for k, choices in _other_keys(parent, config_dir).items() if k not in known}
        having = [choice for choice in elsewhere.get(leaf, []) if choice not in overrides]
        if having:
            return f"unknown key {key} here; it comes with {' or '.join(having)}"
        if not parent and (places := _sections_with(leaf, config_dir, overrides)):
            return f"unknown key {key}; write {' or '.join(places)}"
        more = "; lightning.Trainer's other arguments take a +, as in +trainer.profiler=simple" * (parent == "trainer")
        close = nearest(leaf, [*known, *elsewhere])
        for other, choices in elsewhere.items():
            if close == nearest(other, [other]):
                close = f"{close[:-2]}, which comes with {' or '.join(choices)}?)"
        return f"unknown key {key}{close}; {where} {', '.join(known) or 'no such section'}{more}"
    there = re.search(r"An item is already at '([^']+)'", text)
    if there:
        return f"{there.group(1)} is there already: write {there.group(1)}=..., without +"
    absent = re.search(r"Could not delete from config\. '([^']+)' does not exist", text)
    if absent:  # or it is null, which is the same to Hydra
        parent, _, leaf = absent.group(1).rpartition(".")
        known = _keys(parent, config_dir, overrides)
        why = f"{absent.group(1)} is null already" if leaf in known else f"there is no such key{nearest(leaf, known)}"
        return f"~{absent.group(1)} takes nothing away: {why}"
    followed = re.search(r"Interpolation key '([^']+)' not found", text)
    if followed:
        key = followed.group(1).removeprefix("hydra.runtime.choices.")
        if any(o.startswith("~") and o[1:].partition("=")[0] == key for o in overrides):
            return f"~{key}: {key} cannot be taken away, other keys follow it; write {key}=..."
        full_key = getattr(error, "full_key", None)
        return f"{full_key or 'the configuration'} follows {followed.group(1)}, which is not there"
    group = re.search(r"Could not find '([^']+)'|No match in the defaults list for '([^']+)'", text)
    if group:
        name = group.group(1) or group.group(2)
        known = _keys("", config_dir, [])
        return f"there is no group or key '{name}'{nearest(name, known)}"
    if "Config group override must be" in text:
        odd = [
            o
            for o in overrides
            if _is_group(o, config_dir) and re.search(r"=([^A-Za-z_\"']|(null|true|false)$)", o, re.I)
        ]
        return f"{' '.join(odd) or 'an override'} names no choice; python train.py --help lists them"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: write key=value, and quote a value with special characters"
        )
    return text.strip().splitlines()[0]


def _folders(config_dir: str | None) -> list[Path]:
    return [CONF, *([Path(config_dir)] if config_dir else [])]


def _keys(parent: str, config_dir: str | None, overrides: list[str]) -> list[str]:
    """The keys of a section, to suggest from, with the choices among ``overrides`` made."""
    groups = {path.name for folder in _folders(config_dir) for path in folder.iterdir() if path.is_dir()}
    chosen = [word for word in overrides if word.partition("=")[0] in groups and "," not in word]
    try:
        cfg: Any = _compose(chosen, config_dir)
        section = OmegaConf.select(cfg, parent) if parent else cfg
        return [str(key) for key in section if key != "hydra"] if isinstance(section, DictConfig) else []
    except (HydraException, OmegaConfBaseException):
        return []


def _sections_with(leaf: str, config_dir: str | None, overrides: list[str]) -> list[str]:
    """Where a key lies that was typed without its section: ``optim.lr``."""
    sections = _keys("", config_dir, [])
    return [f"{section}.{leaf}" for section in sections if leaf in _keys(section, config_dir, overrides)]


def _is_group(override: str, config_dir: str | None) -> bool:
    key = override.partition("=")[0].lstrip("+")
    return any((folder / key).is_dir() for folder in _folders(config_dir))


def _other_keys(group: str, config_dir: str | None) -> dict[str, list[str]]:
    """The keys that choices of ``group`` bring along, each with the choices that do, as typed: ``data=text``."""
    files = [path for folder in _folders(config_dir) for path in sorted((folder / group).glob("*.yaml")) if group]
    keys: dict[str, list[str]] = {}
    for path in files:
        for key in OmegaConf.load(path) or {}:
            keys.setdefault(str(key), []).append(f"{group}={path.stem}")
    return keys
