"""Hydra's composition, outside ``@hydra.main``, with its errors turned into one or two sentences."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ffnlab.errors import UserError
from ffnlab.schema import nearest

CONF = Path(__file__).resolve().parents[1] / "conf"
CONFIG_NAME = "train"


def fresh_run_name(block: str, seed: int) -> str:
    """A directory name that reads well, sorts by time and does not collide: ``20261130-081500-swiglu-s3-9f2c``."""
    import secrets
    from datetime import datetime

    block = re.sub(r"[^\w.-]+", "-", block)
    return f"{datetime.now():%Y%m%d-%H%M%S}-{block}-s{seed}-{secrets.token_hex(2)}"


# Cached: Hydra asks for its run directory more than once, and the answer must not change within a process.
OmegaConf.register_new_resolver("fresh_run_name", fresh_run_name, use_cache=True, replace=True)


@dataclass(frozen=True)
class Job:
    """One composed run: the configuration without Hydra's own section, and the choice made in each group."""

    cfg: DictConfig
    choices: dict[str, str]
    run_dir: str


def compose_job(overrides: list[str], config_dir: str | None = None) -> Job:
    """Compose one run from ``overrides`` as typed on the command line.

    Raises:
        UserError: an unknown choice, a misspelt key, a sweep without ``-m``, an override that does not parse.
    """
    with _readable_errors(overrides, config_dir):
        cfg = _compose(overrides, config_dir)
    hydra_cfg = cfg.hydra
    choices = {str(k): str(v) for k, v in hydra_cfg.runtime.choices.items()}
    # hydra.run.dir looks into the hydra section from the root, so it is resolved before the section goes.
    run_dir = str(hydra_cfg.run.dir)
    with _unlocked(cfg):
        del cfg["hydra"]
    return Job(cfg, choices, run_dir)


def _compose(overrides: list[str], config_dir: str | None) -> DictConfig:
    GlobalHydra.instance().clear()
    extra = []
    if config_dir:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir}: there is no such folder")
        extra = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(CONFIG_NAME, overrides=extra + overrides, return_hydra_config=True)
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
    except (ConfigCompositionException, HydraException, OmegaConfBaseException) as error:
        raise UserError(_composition_error(error, overrides, config_dir)) from error


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
        return f"{' '.join(swept) or 'a list of values'} asks for several runs: add -m"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        key = unknown.group(1)
        parent, _, leaf = key.rpartition(".")
        known = _keys(parent, config_dir)
        if leaf in known:  # the key exists: its value did not fit
            return text.splitlines()[0]
        where = f"{parent} has" if parent else "there are"
        return f"unknown key {key}{nearest(leaf, known)}; {where} {', '.join(known) or 'no such section'}"
    group = re.search(r"Could not find '([^']+)'|No match in the defaults list for '([^']+)'", text)
    if group:
        name = group.group(1) or group.group(2)
        known = _keys("", config_dir)
        return f"there is no group or key '{name}'{nearest(name, known)}"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: write key=value, and quote a value with special characters"
        )
    return text.strip().splitlines()[0]


def _keys(parent: str, config_dir: str | None) -> list[str]:
    """The keys of a section in the default configuration, to suggest from."""
    try:
        cfg: Any = _compose([], config_dir)
        section = OmegaConf.select(cfg, parent) if parent else cfg
        return [str(key) for key in section if key != "hydra"] if isinstance(section, DictConfig) else []
    except (HydraException, OmegaConfBaseException):
        return []
