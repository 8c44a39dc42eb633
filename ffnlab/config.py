"""The way to a run's typed configuration, from Hydra's groups and overrides or from plain values, and back."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffnlab.errors import UserError
from ffnlab.run_config import (
    STUDY_KEYS,
    CopyTaskConfig,
    OptimConfig,
    RunConfig,
    StudyConfig,
    TrainConfig,
    WandbConfig,
)
from ffnlab.schema import validate

__all__ = [
    "STUDY_KEYS",
    "CopyTaskConfig",
    "OptimConfig",
    "RunConfig",
    "StudyConfig",
    "TrainConfig",
    "WandbConfig",
    "compose",
    "from_hydra",
    "from_plain",
    "study_from_hydra",
    "to_plain",
]


def from_plain(values: dict[str, Any]) -> RunConfig:
    """Check plain values (the content of a run's ``config.yaml``) and give them types.

    Raises:
        UserError: one line for each unknown key, wrong type or value out of range.
    """
    from ffnlab.ffn import make_block

    values = dict(values)
    ffn = values.pop("ffn", None) or {}
    if not isinstance(ffn, dict):
        raise UserError(f"ffn must be a section with the block's _target_ and options, not {ffn!r}")
    ffn = dict(ffn)
    target = ffn.pop("_target_", None)
    if not isinstance(target, str):
        raise UserError("the ffn section needs _target_: the block's class, e.g. ffnlab.ffn.GatedFFN")
    section: dict[str, Any] = {"name": ffn.pop("name", None) or target.rpartition(".")[2].lower(), "target": target}
    if "down_init" in ffn:
        section["down_init"] = ffn.pop("down_init")
    try:
        make_block(target, ffn)
    except ValueError as error:
        raise UserError(str(error)) from error
    data = values.get("data")
    if values.get("copy_task") is not None and isinstance(data, dict) and data.get("kind") != "copy":
        raise UserError("the copy task brings its own data: use experiment=copy_task without data=...")
    cfg = validate(RunConfig, {**values, "ffn": section | {"options": ffn}})
    cfg.model.check()
    return cfg


def to_plain(cfg: RunConfig) -> dict[str, Any]:
    """The inverse of ``from_plain``: what ``config.yaml`` holds."""
    values = dataclasses.asdict(cfg)
    ffn = values["ffn"]
    values["ffn"] = {"name": ffn["name"], "_target_": ffn["target"], **ffn["options"], "down_init": ffn["down_init"]}
    return values


def from_hydra(cfg: Any, ffn_choice: str | None) -> RunConfig:
    """Resolve what Hydra composed; the block is called by the name of its YAML file.

    Raises:
        UserError: see ``from_plain``; also a mandatory value (``???``) that was not given.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise UserError("\n".join(f"{key} must be given: add {key}=..." for key in missing))
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration does not resolve: {str(error).splitlines()[0]}") from error
    for key in ("experiment", "resume", *STUDY_KEYS):  # how a run is started, not what it is
        values.pop(key, None)
    if isinstance(values.get("ffn"), dict) and ffn_choice:
        values["ffn"].setdefault("name", ffn_choice.rpartition("/")[2])
    try:
        return from_plain(values)
    except UserError as error:
        raise UserError(_once(str(error))) from error


def _once(lines: str) -> str:
    """``init_seed`` and ``data_seed`` follow ``seed``: what is wrong with all three is said of ``seed`` alone."""
    seed = next((line for line in lines.splitlines() if line.startswith("seed ")), "")
    follow = {f"{part}_{seed}" for part in ("init", "data")} if seed else set()
    return "\n".join(line for line in lines.splitlines() if line not in follow)


def study_from_hydra(cfg: Any) -> StudyConfig:
    """The keys of a study among what Hydra composed.

    Raises:
        UserError: a value that is not allowed.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, list(STUDY_KEYS)), resolve=True)
    return validate(StudyConfig, values)


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """Compose a run's configuration outside the command line: notebooks, tests, scripts.

    Args:
        overrides: as typed after ``train.py``, e.g. ``["ffn=swiglu", "seed=3"]``.
        config_dir: a folder of your own YAML groups, e.g. with ``ffn/mine.yaml``.

    Raises:
        UserError: unknown choices, misspelt keys, wrong types.
    """
    from ffnlab.composition import compose_job

    job = compose_job(list(overrides), str(config_dir) if config_dir else None)
    return from_hydra(job.cfg, job.choices.get("ffn"))
