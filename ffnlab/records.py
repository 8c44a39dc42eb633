"""The records of a run and of a study as they are read back, and the one place where they are held against a shape.

Whatever reads ``run.json``, ``result.json``, ``study.json`` or ``config.yaml`` computes with what it finds there. A
crash, a full disk or a person may have left anything at all, so a shape says what each key that is computed with must
hold, and what does not is refused by file and key. Keys may be missing where older runs lack them, and there may be
more.
"""

import json
import math
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Required,  # pydantic takes the standard one from Python 3.12 on
)

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, with_config
from typing_extensions import TypedDict

from ffnlab.errors import UserError
from ffnlab.schema import NonNegativeFloat, NonNegativeInt, first_violation

STUDY = "study.json"
LOOSE = ConfigDict(extra="allow")
LARGEST = 1e100  # no figure of ours comes near, and the square of a larger one overflows


def _complete(result: dict[str, float | None]) -> dict[str, float | None]:
    if "val/loss" not in result:
        raise ValueError("must hold val/loss")
    for key in ("steps", "tokens", "seconds"):  # counted, never computed, so that they are never null
        value = result.get(key, 0.0)
        if value is None or not 0 <= value < math.inf:
            raise ValueError(f"must hold a number of {key}")
    return result


def _sane(figure: float) -> float:
    if abs(figure) > LARGEST:
        raise ValueError(f"must be below {LARGEST:g}")
    return figure


Figure = Annotated[float, AfterValidator(_sane)]
Result = Annotated[dict[str, Figure | None], AfterValidator(_complete)]


@with_config(LOOSE)
class Budget(TypedDict, total=False):
    """``run.json: budget``."""

    kind: str
    d_ff: NonNegativeInt
    params: NonNegativeInt
    mismatch: Figure | None
    matched: bool


@with_config(LOOSE)
class Git(TypedDict, total=False):
    """``run.json: git``."""

    revision: str | None
    dirty: bool | None


@with_config(LOOSE)
class Hardware(TypedDict, total=False):
    """``run.json: hardware``."""

    device: str


@with_config(LOOSE)
class Run(TypedDict, total=False):
    """``run.json``."""

    status: Required[str]
    created: str
    block: str
    study: str | None
    seed: NonNegativeInt
    init_seed: NonNegativeInt
    data_seed: NonNegativeInt
    command: str
    steps: NonNegativeInt
    tokens: NonNegativeInt
    flops_per_token: NonNegativeInt
    unigram_loss: Figure | None
    budget: Budget
    parameters: dict[str, NonNegativeInt]
    hashes: dict[str, str]
    code: str
    package_code: str
    git: Git
    hardware: Hardware
    resumed: list[Any]
    wandb_id: str | None
    seconds: NonNegativeFloat | None
    error: str | None
    diverged: dict[str, Any] | None


@with_config(LOOSE)
class Entry(TypedDict, total=False):
    """A cell's entry in ``study.json``."""

    block: Required[str]
    seed: Required[NonNegativeInt]
    overrides: Required[list[str]]
    status: Required[str]
    init_seed: NonNegativeInt
    data_seed: NonNegativeInt
    seconds: NonNegativeFloat | None
    result: Result | None
    error: str | None
    stale: bool
    pid: int | None
    host: str | None


@with_config(LOOSE)
class Manifest(TypedDict, total=False):
    """``study.json``, its entries apart: one damaged entry says nothing about the others."""

    study: str | None
    command: str | None
    commands: list[str]
    analysis: str
    baseline: str | None
    kind: str | None
    tuning_seeds: list[NonNegativeInt] | None
    cells: dict[str, Any]


@with_config(LOOSE)
class _Block(TypedDict, total=False):
    name: str


@with_config(LOOSE)
class _Data(TypedDict, total=False):
    kind: str
    paths: Annotated[list[str], BeforeValidator(lambda paths: [paths] if isinstance(paths, str) else paths)]
    repo: str | None


@with_config(LOOSE)
class Config(TypedDict, total=False):
    """``config.yaml``, as far as a report reads it; to train from it, it must fit ``RunConfig``."""

    ffn: _Block
    data: _Data
    seed: NonNegativeInt


SHAPES: dict[str, Any] = {"run.json": Run, "result.json": Result, STUDY: Manifest, "config.yaml": Config}


def read(path: Path) -> dict[str, Any]:
    """Read one of the records above, by its name; the values are as written.

    Raises:
        UserError: one line: it is missing, unreadable, or of another shape.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        json.dumps(value, default=str, skipkeys=True)  # YAML can hold itself, and what walks it would never end
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path} cannot be read: not valid YAML{where} ({error.problem})") from None
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read: {reason}") from None
    if not isinstance(value, dict):
        what = "configuration" if path.suffix == ".yaml" else "JSON object"
        raise UserError(f"{path} does not hold a {what}")
    _hold(SHAPES[path.name], value, path)
    return value


def read_study(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a ``study.json``, and what is wrong with which entry; a damaged one is left empty.

    Raises:
        UserError: see ``read``.
    """
    manifest = read(path)
    damaged: dict[str, str] = {}
    cells: dict[str, dict[str, Any]] = {}
    for name, entry in (manifest.get("cells") or {}).items():
        try:
            if not name or len(name.encode()) > 255 or name in (".", "..") or any(c in "/\\\0" for c in name):
                raise UserError(f"{path}: cells: {name[:40]!r} is no folder's name")
            _hold(Entry, entry, path, ("cells", name))
        except UserError as error:
            damaged[name] = str(error)
        cells[name] = {} if name in damaged else entry
    return manifest | {"cells": cells}, damaged


def _hold(shape: Any, value: Any, path: Path, within: tuple[str, ...] = ()) -> None:
    problem = first_violation(shape, value, within)
    if problem:
        raise UserError(f"{path}: {problem}")
