"""From a command line to the cells of a study."""

import hashlib
import re
from collections.abc import Sequence

from omegaconf import DictConfig

from ffnlab.call import override
from ffnlab.composition import Sweep, compose_job, compose_sweep
from ffnlab.config import STUDY_KEYS, StudyConfig, from_hydra, study_from_hydra
from ffnlab.errors import UserError
from ffnlab.study.cells import Cell, cell_name

# How a command is run; none of it says which study is meant.
NOT_NAMING = re.compile(rf"^[+~]*({'|'.join(STUDY_KEYS)}|study|trainer|logger)([.=]|$)")


def take_apart(overrides: list[str], config_dir: str | None, several: bool) -> tuple[Sweep, StudyConfig]:
    """The runs that a command asks for, and the study's settings.

    Args:
        overrides: as typed.
        config_dir: a folder of the user's own groups.
        several: False takes the command as one cell.

    Raises:
        UserError: what cannot be composed, or makes no sense for a study.
    """
    sweep = compose_sweep(overrides, config_dir)
    if not several:
        sweep = Sweep(sweep.master, [sweep.typed], sweep.typed, sweep.context)
    if sweep.master.get("resume"):
        raise UserError("resume=DIRECTORY goes on with one run; a study goes on when its command is run again")
    if not str(sweep.master.hydra.sweeper._target_).endswith("BasicSweeper"):
        raise UserError("a study runs every combination of its values: leave hydra/sweeper as it is")
    swept = [o for o in sweep.typed if o.startswith("experiment=") and "," in o]
    if swept:
        raise UserError(f"{swept[0]}: one experiment is one study; run them one after the other")
    for key in ("study", "resume", *STUDY_KEYS):
        values = {o.partition("=")[2]: None for job in sweep.jobs for o in job if re.match(rf"\+*{key}=", o)}
        if len(values) > 1:
            raise UserError(f"{key}={','.join(values)}: one command is one study, and has one {key}")
    return sweep, study_from_hydra(sweep.master)


def study_name(cfg: DictConfig, typed: Sequence[str]) -> str:
    """The study's folder: ``study=NAME``, else a name that follows from the command, so that the same command resumes.

    ``experiment=glu_variants`` alone is ``glu_variants``; anything more adds four digits of a hash of it.
    """
    if isinstance(cfg.get("study"), bool | float):
        raise UserError(f"study must be a name, not {str(cfg.study).lower()}; in a YAML file a name can be quoted")
    if cfg.get("study"):
        return str(cfg.study)
    experiment = str(cfg.hydra.runtime.choices.get("experiment") or "none")
    parts = sorted(o for o in typed if not NOT_NAMING.match(o))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:4]
    if experiment != "none":
        name = re.sub(r"[^\w.-]+", "-", experiment.rpartition("/")[2])
        return name if len(parts) == 1 else f"{name}-{digest}"
    blocks = next((o.partition("=")[2] for o in typed if o.startswith("ffn=")), "study")
    name = re.sub(r"[^A-Za-z0-9_]+", "-", blocks).strip("-")[:40]
    return f"{name}-{digest}"


def make_cells(jobs: Sequence[Sequence[str]], study: str, config_dir: str | None) -> list[Cell]:
    """Compose and check every cell; one that is asked for twice is one cell.

    Raises:
        UserError: one line for each cell that cannot be composed.
    """
    cells: dict[str, Cell] = {}
    problems: dict[str, None] = {}
    for job in jobs:
        overrides = [o for o in job if not re.match(rf"[+~]*({'|'.join(STUDY_KEYS)}|study)=", o)]
        try:
            composed = compose_job([*overrides, override("study", study)], config_dir)
            cfg = from_hydra(composed.cfg, composed.choices.get("ffn"))
        except UserError as error:
            problems.update(dict.fromkeys(str(error).splitlines()))
            continue
        name = cell_name(cfg)
        cells.setdefault(name, Cell(name, overrides, cfg))
    if problems:
        raise UserError("\n".join(problems))
    return list(cells.values())
