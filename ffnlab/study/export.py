"""A study's answer for programs: ``report.json``, and its cells as a table, ``cells.csv``."""

import csv
import dataclasses
import io
import math
import os
from pathlib import Path
from typing import Any

import ffnlab
from ffnlab.study import origin, words
from ffnlab.study.answer import Analysis, Arm
from ffnlab.study.load import LAYER
from ffnlab.study.power import POWER
from ffnlab.study.statistics import LEVEL

# Of a cell: who it is and how it went; then what it was made of and took.
FIRST = ("cell", "arm", "block", "lr", "seed", "init_seed", "data_seed", "status", "stale")
LAST = ("d_ff", "params", "ffn_params", "flops", "mismatch", "steps", "tokens", "seconds", "tokens_per_s", "error")
RENAMED = {"flops": "flops_per_token"}


def as_csv(analyses: list[Analysis], out: Path) -> str:
    """One row a cell, with the final figures that any of them has (means over layers; empty where one has not).

    ``directory`` is relative to ``out``, where the table lies.
    """
    cells = [(a.study, row) for a in analyses for row in a.study.cells.sort_values("cell").to_dict("records")]
    figures = list(
        dict.fromkeys(key for _, row in cells for key in row["result"] if "/" in key and not LAYER.match(key))
    )
    head = ["study", *FIRST, *figures, *(RENAMED.get(name, name) for name in LAST), "directory"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    for study, row in cells:
        values = [study.name, *(row[name] for name in FIRST), *(row["result"].get(name) for name in figures)]
        values += [*(row[name] for name in LAST), os.path.relpath(study.path / row["cell"], out)]
        table.writerow(map(_field, values))
    return text.getvalue()


def _field(value: Any) -> object:
    """A number in full, a name without what could drive a terminal, and nothing for what is not known."""
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return "" if value is None else words.plain(value) if isinstance(value, str) else value


def as_json(analyses: list[Analysis]) -> dict[str, Any]:
    """The report as plain data.

    What depends on the machine's speed is under ``timing`` alone: the rest of a resumed study's report equals that of
    an undisturbed one.
    """
    return {
        "ffnlab": ffnlab.__version__,
        "level": LEVEL,
        "power": POWER,
        "studies": [_study_json(analysis) for analysis in analyses],
    }


def _study_json(analysis: Analysis) -> dict[str, Any]:
    study = analysis.study
    cells = study.cells.sort_values("cell")
    columns = [
        "arm", "block", "lr", "seed", "init_seed", "data_seed", "status", "stale", "error", "loss", "perplexity", "bpb",
        "steps", "tokens", "d_ff", "params", "flops", "mismatch", "matched",
    ]  # fmt: skip
    record: dict[str, Any] = {
        "study": study.name,
        "kind": study.kind,
        "analysis": study.analysis,
        "declared": study.declared,
        "baseline": study.baseline,
        "comparisons": analysis.comparisons,
        "headline": words.headline(analysis),
        "provenance": {key: "\n".join(lines) for key, lines in origin.provenance(analysis)},
        "scale": analysis.scale,
        "problems": [dataclasses.asdict(problem) for problem in analysis.problems if problem.kind != "speed"],
        "limits": analysis.limits,
        "remarks": analysis.remarks,
        "arms": [_arm_json(arm, analysis) for arm in analysis.arms],
        "correlations": analysis.correlations,
        "pairing": words.pairing(analysis),
        "rates": [dataclasses.asdict(rate) for rate in analysis.rates],
        "tuning_seeds": analysis.tuning_seeds,
        "noise": None,
        "cells": {str(row["cell"]): {c: row[c] for c in columns} for row in cells.to_dict("records")},
        "outlying": [dataclasses.asdict(run) for run in analysis.outlying],
        "timing": {
            "problems": [dataclasses.asdict(problem) for problem in analysis.problems if problem.kind == "speed"],
            "arms": {arm.name: {"tokens_per_s": arm.tokens_per_s} for arm in analysis.arms},
            "cells": {
                str(row["cell"]): {"seconds": row["seconds"], "tokens_per_s": row["tokens_per_s"]}
                for row in cells.to_dict("records")
            },
        },
    }
    if analysis.noise:
        noise = {
            f.name: getattr(analysis.noise, f.name) for f in dataclasses.fields(analysis.noise) if f.name != "grid"
        }
        noise["components"] = [dataclasses.asdict(component) for component in analysis.noise.components]
        grid = analysis.noise.grid
        noise["grid"] = {str(i): {str(j): float(v) for j, v in row.items()} for i, row in grid.iterrows()}
        record["noise"] = noise
    return dict(_plain(record))


def _arm_json(arm: Arm, analysis: Analysis) -> dict[str, Any]:
    record = dataclasses.asdict(arm)
    record.pop("tokens_per_s")
    record["sentence"] = words.sentence(arm, analysis)
    record["verdict"] = arm.primary.verdict if arm.primary else None
    return record


def _plain(value: Any) -> Any:
    """Plain JSON: string keys, no NaN, no numpy scalars."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
