"""Read a study's folder into tables: one row a cell, and one row a logged value.

The ledger is the truth: ``study.json`` says which cells belong to the study and what the runner saw, each cell's own
``run.json`` and ``result.json`` say what happened. A folder of run directories without a ``study.json`` works too.
"""

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffnlab import records
from ffnlab.errors import UserError
from ffnlab.study.row import number, read_row

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("blocks", "noise_floor", "lr_sensitivity")
UNMATCHED = " (unmatched)"
LAYER = re.compile(r"^(?P<metric>[^_].*)_L(?P<layer>\d+)$")


@dataclass
class Study:
    """A study as it lies on disk.

    ``cells`` has one row a cell: cell, arm, block, lr, seed, init_seed, data_seed, status, stale, error, loss,
    perplexity, bpb, seconds, tokens_per_s, steps, tokens, d_ff, params, flops, mismatch, matched, budget, revision,
    dirty, code, device, command, hash_data, hash_batches, hash_shared_init, plus ``result`` (the flat dict),
    ``settings`` (what varies within a block, as a dict) and ``conditions`` (what is set apart from the block and the
    optimiser, as a tuple).
    An arm is a block together with whatever else varies between the study's cells.
    """

    name: str
    path: Path
    command: str
    analysis: str
    baseline: str
    kind: str
    tuning_seeds: list[int] | None
    cells: "pd.DataFrame"
    varying: list[str] = field(default_factory=list)
    declared_baseline: str = ""
    declared: bool = True  # False: put together from run directories, so nothing was declared before it ran
    damaged: dict[str, str] = field(default_factory=dict)  # cells that are left out, with what is wrong with each

    @property
    def arms(self) -> list[str]:
        """The arms in the study's order."""
        return list(dict.fromkeys(self.cells["arm"]))


def load_study(path: Path, baseline: str | None = None, kind: str | None = None) -> Study:
    """Read ``path``; ``baseline`` and ``kind`` override what the study declared.

    Raises:
        UserError: no study there, a damaged record, an unknown baseline.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_dir():
        raise UserError(f"There is no folder {path}. Give the folder of a study, as in outputs/NAME.")
    declared = (path / records.STUDY).exists()
    if not declared and (path / "run.json").exists():
        raise UserError(f"{path} is one run, not a study. Give the folder that holds its runs.")
    manifest: dict[str, Any] = {"cells": {run: {} for run in _runs(path)}}
    damaged: dict[str, str] = {}
    if declared:
        manifest, damaged = records.read_study(path / records.STUDY)
    if not manifest["cells"]:
        raise UserError(f"{path} holds no runs: no study.json and no folder with a run.json.")
    rows = []
    for name in manifest["cells"]:
        if name in damaged:
            continue
        try:
            rows.append(read_row(path / name, name, manifest["cells"][name]))
        except UserError as error:  # the other cells have their answer all the same
            damaged[name] = str(error)
    if not rows:
        raise UserError(f"{path} holds no cell that can be read: {next(iter(damaged.values()))}")
    kind = kind or manifest.get("kind") or _kind(rows, str(manifest.get("command", "")))
    if kind not in KINDS:
        raise UserError(f"Unknown kind of study {kind!r}; choose one of {', '.join(KINDS)}.")
    varying = _varying(rows, without_lr=kind == "lr_sensitivity")
    short = _short_names(varying)
    for row in rows:
        row["settings"] = {short[key]: row["all_settings"].get(key, "default") for key in varying}
        row["arm"] = " · ".join([row["block"], *(f"{key}={value}" for key, value in row["settings"].items())])
        row["conditions"] = _conditions(row.pop("all_settings"))
    # A comparison that is not at equal budgets says so wherever the arm is named.
    unmatched = {row["arm"] for row in rows if row["matched"] is False}
    for row in rows:
        row["arm"] += UNMATCHED if row["arm"] in unmatched else ""
    cells = pd.DataFrame(rows)
    tuning = manifest.get("tuning_seeds")
    study = Study(
        name=str(manifest.get("study") or path.resolve().name),
        path=path,
        command=str(manifest.get("command") or _first(cells["command"])),
        analysis=str(manifest.get("analysis", "unpaired")),
        baseline="",
        kind=kind,
        tuning_seeds=[int(seed) for seed in tuning] if tuning is not None else None,
        cells=cells,
        varying=varying,
        declared=declared,
        damaged=damaged,
    )
    if study.analysis not in ("unpaired", "paired"):
        raise UserError(f"study.json declares analysis {study.analysis!r}; it must be unpaired or paired.")
    listed = manifest.get("baseline")
    gone = bool(damaged) and listed is not None and not _arm_named(study, listed)  # all its cells may be damaged
    study.baseline = _baseline(study, baseline or (None if gone else listed))
    study.declared_baseline = str(listed) if gone else _baseline(study, listed) if baseline else study.baseline
    return study


def _baseline(study: Study, wanted: str | None) -> str:
    """The arm that others are compared with; a block's name means the first arm of that block."""
    arms = study.arms
    if wanted is None:
        wanted = "gelu" if "gelu" in set(study.cells["block"]) else arms[0]
    if arm := _arm_named(study, wanted):
        return arm
    raise UserError(f"The baseline {wanted!r} is not in the study. Choose one of: {', '.join(arms)}.")


def _arm_named(study: Study, wanted: str) -> str:
    for arm in (wanted, wanted + UNMATCHED):
        if arm in study.arms:
            return arm
    of_block = study.cells.loc[study.cells["block"] == wanted, "arm"]
    return "" if of_block.empty else str(of_block.iloc[0])


def _runs(path: Path) -> list[str]:
    return sorted(d.name for d in path.iterdir() if (d / "run.json").exists())


def _kind(rows: list[dict[str, Any]], command: str) -> str:
    """What the study asks, where it does not say so itself."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    for kind in KINDS:
        if f"experiment={kind}" in words or f"+experiment={kind}" in words:
            return kind
    crossed = any(row["init_seed"] != row["data_seed"] for row in rows)
    return "noise_floor" if crossed and len({row["block"] for row in rows}) == 1 else "blocks"


def _varying(rows: list[dict[str, Any]], without_lr: bool) -> list[str]:
    """Settings whose value differs between cells of one block: they tell arms of one block apart."""
    keys = dict.fromkeys(key for row in rows for key in row["all_settings"])
    values: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for key in keys:
            values.setdefault(key, {}).setdefault(row["block"], set()).add(str(row["all_settings"].get(key, "default")))
    return [
        key
        for key in keys
        if any(len(seen) > 1 for seen in values[key].values()) and not (without_lr and key == "optim.lr")
    ]


def _conditions(settings: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Settings under which equal seeds must give equal batches and equal shared weights."""
    apart = ("ffn.", "ffn@", "optim.", "budget.")
    return tuple(sorted((key, str(value)) for key, value in settings.items() if not key.startswith(apart)))


def _short_names(keys: list[str]) -> dict[str, str]:
    last = [re.split(r"[./]", key)[-1] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def _first(values: "pd.Series[Any]") -> str:
    return next((str(value) for value in values if value), "")


def load_curves(study: Study) -> "pd.DataFrame":
    """Every logged value: cell, arm, seed, step, tokens, seconds, flops, metric, layer (-1: the mean), value.

    ``flops`` is training FLOPs so far. Lines and values that cannot be read are left out, as the torn
    last line of a run that is being written.
    """
    import pandas as pd

    frames = []
    for row in study.cells[["cell", "arm", "seed", "flops"]].to_dict("records"):
        points: list[tuple[float, float, float, str, int, float]] = []
        path = study.path / str(row["cell"]) / "metrics.jsonl"
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                point = json.loads(line)
                points.extend(_values(point) if isinstance(point, dict) else ())
        frame = pd.DataFrame(points, columns=["step", "tokens", "seconds", "metric", "layer", "value"])
        frame = frame.drop_duplicates(["step", "metric", "layer"], keep="last")  # a resumed run logs a step again
        flops = frame["tokens"].astype(float) * float(row["flops"])
        frames.append(frame.assign(cell=row["cell"], arm=row["arm"], seed=row["seed"], flops=flops))
    return pd.concat(frames, ignore_index=True)


def _values(point: dict[str, Any]) -> Iterator[tuple[float, float, float, str, int, float]]:
    step, tokens, seconds = (number(point.get(key)) for key in ("step", "tokens", "seconds"))
    if math.isnan(step):
        return
    for key, value in point.items():
        if "/" not in key or math.isnan(figure := number(value)):
            continue
        match = LAYER.match(key)
        metric, layer = (match["metric"], int(match["layer"])) if match else (key, -1)
        yield step, tokens, seconds, metric, layer, figure
