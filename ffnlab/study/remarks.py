"""What a reader is told beside the verdicts: how big the study was, which runs lie far out, whose speed to distrust."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ffnlab.study.answer import Arm, Outlying
from ffnlab.study.checks import Problem
from ffnlab.study.load import Study

if TYPE_CHECKING:
    import pandas as pd

FAR = 4.0  # robust standard deviations from the block's median
MAD_TO_SD = 1.4826  # the median absolute deviation of a normal sample times this is its SD
MIN_RUNS = 5  # with fewer, half of the runs say nothing about the rest
SAME_FLOPS = 0.02
SPEED_RATIO = 1.5
MANY_DEAD = 0.1  # of a layer's neurons, in some seed
LONG_WARMUP = 0.5  # of a run's steps
SCOPE = "This study says nothing about another size, other data, other learning rates or longer training."


def outlying(cells: "pd.DataFrame") -> list[Outlying]:
    """Runs more than `FAR` robust SDs (MAD) from the median of their arm, which stay in every mean and test."""
    found = []
    for arm, rows in cells[cells["status"] == "finished"].groupby("arm", sort=False):
        losses = rows["loss"].to_numpy(dtype=float)
        middle = float(np.median(losses))
        sd = MAD_TO_SD * float(np.median(np.abs(losses - middle)))
        if len(losses) < MIN_RUNS or sd == 0:
            continue
        for row in rows.to_dict("records"):
            distance = (float(row["loss"]) - middle) / sd
            if abs(distance) > FAR:
                found.append(
                    Outlying(str(arm), int(row["init_seed"]), int(row["data_seed"]), float(row["loss"]), distance)
                )
    return found


def many_dead(arms: list[Arm], metric: str = "dead/rel") -> list[str]:
    """A sentence on each arm that left many of some layer's neurons unused: the worst layer, seed by seed unequal."""
    said = []
    for arm in arms:
        ranges = arm.layer_ranges.get(metric, [])
        many = [layer for layer, (_, high) in enumerate(ranges) if high > MANY_DEAD]
        if not many:
            continue
        worst = max(many, key=lambda layer: ranges[layer][1])
        low, high = ranges[worst]
        spread = f" on average and {low:.1%} to {high:.1%} by seed" if arm.n > 1 else ""
        text = f"{arm.name} has many dead neurons ({metric} on the final census): "
        text += f"in layer {worst} {arm.by_layer[metric][worst]:.1%}{spread}"
        if len(many) > 1:
            text += f"; {len(many)} of {len(ranges)} layers have more than {MANY_DEAD:.0%} in some seed"
        said.append(text + ".")
    return said


def speed_problems(arms: list[Arm]) -> list[Problem]:
    """One problem where blocks of equal FLOPs differ much in tokens/s: the machine had other work, not the block."""
    known = [arm for arm in arms if arm.flops > 0 and arm.tokens_per_s > 0]  # NaN is not above 0
    pairs = [
        (slow, fast)
        for slow in known
        for fast in known
        if abs(slow.flops - fast.flops) <= SAME_FLOPS * fast.flops
        and fast.tokens_per_s > SPEED_RATIO * slow.tokens_per_s
    ]
    if not pairs:
        return []
    slow, fast = max(pairs, key=lambda pair: pair[1].tokens_per_s / pair[0].tokens_per_s)
    text = (
        f"Speeds are not comparable: {slow.name} ran at {slow.tokens_per_s:,.0f} tokens/s and {fast.name} at "
        f"{fast.tokens_per_s:,.0f} for equal FLOPs, as happens when cells run beside other work. "
        "For speed use scripts/bench.py."
    )
    return [Problem("speed", text)]


def data_names(study: Study) -> list[str]:
    """What the cells were trained on, from their configurations; one cell is read for each data hash."""
    names: dict[str, None] = {}
    for cell in study.cells.drop_duplicates("hash_data")["cell"]:
        if name := _data_name(_config(study, str(cell), "data")):
            names[name] = None
    return list(names)


def _config(study: Study, cell: str, part: str) -> dict[str, Any]:
    """One part of a cell's configuration; empty where there is none."""
    import yaml

    path = study.path / cell / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    found = content.get(part) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def warmup_problems(study: Study, cells: "pd.DataFrame") -> list[Problem]:
    """One problem where the rate was still climbing for most of the runs; one cell is read for each arm."""
    done = cells[(cells["status"] == "finished") & (cells["steps"] > 0)].drop_duplicates("arm")
    long: dict[str, list[str]] = {}
    for row in done.to_dict("records"):
        warmup, steps = _config(study, str(row["cell"]), "optim").get("warmup"), int(row["steps"])
        if isinstance(warmup, int) and warmup > LONG_WARMUP * steps:
            long.setdefault(f"{min(warmup, steps)} of {steps} steps", []).append(str(row["arm"]))
    if not long:
        return []
    every = len(long) == 1 and len(done) == sum(map(len, long.values()))
    took = "; ".join(share if every else f"{share} ({', '.join(arms)})" for share, arms in long.items())
    text = (
        f"Warm-up took {took}: the learning rate climbed for most of the run, and verdicts are of a start of training. "
        "Train longer, or shorten optim.warmup."
    )
    return [Problem("warmup", text)]


def _data_name(data: dict[str, Any]) -> str:
    kind = str(data.get("kind") or "")
    if kind == "text":
        paths = data.get("paths") or []
        return ", ".join(Path(str(path)).name for path in ([paths] if isinstance(paths, str) else paths)) or kind
    if kind == "hub":
        return str(data.get("repo") or kind)
    return "the copy task" if kind == "copy" else kind


def scale(arms: list[Arm], cells: "pd.DataFrame", data: list[str], crossed: bool) -> str:
    """``0.65 M parameters, 0.51 M tokens of shakespeare, 6 seeds``; what is not recorded is left out."""
    parts = []
    if params := _range([arm.params for arm in arms]):
        parts.append(f"{params} parameters")
    if tokens := _range([float(value) for value in cells["tokens"]]):
        parts.append(f"{tokens} tokens" + (f" of {' and '.join(data)}" if data else ""))
    number, what = (len(cells), "run") if crossed else (cells["seed"].nunique(), "seed")
    parts.append(f"{number} {what}{'' if number == 1 else 's'}")
    unigram = cells["unigram"].dropna()
    ends = dict.fromkeys(f"{value:.4f}" for value in (unigram.min(), unigram.max())) if len(unigram) else {}
    return ", ".join(parts) + (f"; a unigram model's loss is {' to '.join(ends)}" if ends else "")


def _range(values: list[float]) -> str:
    """``0.65 M``, or ``0.65 M to 1.20 M`` where arms differ by what two decimals show."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low, high = _size(min(known)), _size(max(known))
    return low if low == high else f"{low} to {high}"


def _size(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e5, "M")):
        if value >= unit:
            return f"{value / max(unit, 1e6):.2f} {letter}"
    return f"{value:,.0f}"
