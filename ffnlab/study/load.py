"""Read a study's folder into tables: one row a cell, and one row a logged value.

The ledger is the truth: ``study.json`` says which cells belong to the study and what the runner saw, each cell's own
``run.json`` and ``result.json`` say what happened. A folder of run directories without a ``study.json`` works too.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffnlab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("blocks", "noise_floor", "lr_sensitivity")
# Settings that name a cell, a machine or a way to log it; they never make two cells two different blocks.
NOT_SETTINGS = re.compile(
    r"^(ffn|seed|init_seed|data_seed|study|name|resume|retry|stale|analysis|baseline|kind|experiment)$"
    r"|^(hydra|logger|trainer(?!\.precision)|paths|ffn\.(name|target|_target_)|train\.(log_every|val_every|val_batch_size|compile|checkpoint_blocks))(/|\.|$)"
)
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
    manifest = _read_json(path / "study.json") if (path / "study.json").exists() else None
    if manifest is None and (path / "run.json").exists():
        raise UserError(f"{path} is one run, not a study. Give the folder that holds its runs.")
    declared = manifest is not None
    manifest = manifest or {"cells": {run: {} for run in _runs(path)}}
    entries = manifest.get("cells") or {}
    if not entries:
        raise UserError(f"{path} holds no runs: no study.json and no folder with a run.json.")
    rows = [_cell(path / name, name, entry or {}) for name, entry in entries.items()]
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
    )
    if study.analysis not in ("unpaired", "paired"):
        raise UserError(f"study.json declares analysis {study.analysis!r}; it must be unpaired or paired.")
    study.baseline = _baseline(study, baseline or manifest.get("baseline"))
    study.declared_baseline = _baseline(study, manifest.get("baseline")) if baseline else study.baseline
    return study


def _baseline(study: Study, wanted: str | None) -> str:
    """The arm that others are compared with; a block's name means the first arm of that block."""
    arms = study.arms
    if wanted is None:
        wanted = "gelu" if "gelu" in set(study.cells["block"]) else arms[0]
    for arm in (wanted, wanted + UNMATCHED):
        if arm in arms:
            return arm
    of_block = study.cells.loc[study.cells["block"] == wanted, "arm"]
    if of_block.empty:
        raise UserError(f"The baseline {wanted!r} is not in the study. Choose one of: {', '.join(arms)}.")
    return str(of_block.iloc[0])


def _runs(path: Path) -> list[str]:
    return sorted(d.name for d in path.iterdir() if (d / "run.json").exists())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Restore it or remove its run and run the study again."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object.")
    return content


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _cell(run_dir: Path, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """One row: what the manifest says of a cell together with the cell's own records."""
    run = _read_json(run_dir / "run.json") if (run_dir / "run.json").exists() else {}
    result = entry.get("result") or {}
    if (run_dir / "result.json").exists():
        result = _read_json(run_dir / "result.json")
    config = _config(run_dir)
    budget, hashes = run.get("budget") or {}, run.get("hashes") or {}
    git, hardware = run.get("git") or {}, run.get("hardware") or {}
    seed = entry.get("seed", run.get("seed", config.get("seed", 0)))
    loss = _number(result.get("val/loss"))
    status = _status(entry.get("status"), run.get("status"), result, loss)
    if status != "finished":
        loss = math.nan
    overrides = [str(o) for o in entry.get("overrides") or []]
    settings = (
        dict(_settings(overrides)) if overrides else {k: v for k, v in config.items() if not NOT_SETTINGS.match(k)}
    )
    return {
        "cell": name,
        "block": str(entry.get("block") or run.get("block") or config.get("ffn.name") or name),
        "seed": int(seed),
        "init_seed": int(run.get("init_seed", seed)),
        "data_seed": int(run.get("data_seed", seed)),
        "lr": _number(_parse(settings.get("optim.lr", config.get("optim.lr")))),
        "status": status,
        "stale": entry.get("status") == "stale" or bool(entry.get("stale", False)),
        "error": str(entry.get("error") or run.get("error") or _divergence(run)),
        "loss": loss,
        "perplexity": _number(result.get("val/perplexity")),
        "bpb": _number(result.get("val/bpb")),
        "seconds": _number(result.get("seconds", run.get("seconds"))),
        "tokens_per_s": _number(result.get("tokens_per_s")),
        "steps": _number(result.get("steps", run.get("steps"))),
        "tokens": _number(result.get("tokens", run.get("tokens"))),
        "d_ff": _number(budget.get("d_ff")),
        "params": _number((run.get("parameters") or {}).get("total")),
        "ffn_params": _number(budget.get("params")),
        "flops": _number(run.get("flops_per_token")),
        "mismatch": _number(budget.get("mismatch")),
        "matched": budget.get("matched"),
        "budget": str(budget.get("kind", "")),
        "revision": str(git.get("revision") or ""),
        "dirty": bool(git.get("dirty", False)),
        "code": str(run.get("code") or ""),
        "package_code": str(run.get("package_code") or ""),
        "unigram": _number(run.get("unigram_loss")),
        "device": str(hardware.get("device") or ""),
        "command": str(run.get("command") or ""),
        "hash_data": str(hashes.get("data") or ""),
        "hash_batches": str(hashes.get("batches") or ""),
        "hash_shared_init": str(hashes.get("shared_init") or ""),
        "result": result if status == "finished" else {},
        "all_settings": settings,
    }


def _status(listed: Any, own: Any, result: dict[str, Any], loss: float) -> str:
    """The runner's word on failure outranks the run's own record, which a killed process leaves at `running`."""
    if listed in ("failed", "diverged"):
        return str(listed)
    status = str(own or listed or "missing")
    if own is None and status in ("stale", "pending", "running", "interrupted"):
        status = "finished" if result else "missing"
    if status == "finished" and not result:
        return "interrupted"
    if status == "finished" and math.isnan(loss):
        return "diverged" if "val/loss" in result else "interrupted"
    return status


def _divergence(run: dict[str, Any]) -> str:
    what = run.get("diverged")
    if not isinstance(what, dict):
        return ""
    return f"diverged at step {what.get('step')} in {what.get('tensor')} (lr {what.get('lr')})"


def _config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration, flat: ``{"optim.lr": 0.001}``."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        raise UserError(f"{path} is not valid YAML. Remove its run and run the study again.") from None
    return dict(_flatten(content)) if isinstance(content, dict) else {}


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _settings(overrides: list[str]) -> Iterator[tuple[str, str]]:
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if equals and not NOT_SETTINGS.match(key):
            yield key, value


def _parse(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


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

    ``flops`` is training FLOPs so far. A torn last line, as a run that is being written has, is left out.
    """
    import pandas as pd

    frames = []
    for row in study.cells[["cell", "arm", "seed", "flops"]].to_dict("records"):
        points: list[tuple[float, float, float, str, int, float]] = []
        path = study.path / str(row["cell"]) / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                point = json.loads(line)
            except ValueError:
                continue
            if isinstance(point, dict):
                points.extend(_values(point))
        frame = pd.DataFrame(points, columns=["step", "tokens", "seconds", "metric", "layer", "value"])
        frame = frame.drop_duplicates(["step", "metric", "layer"], keep="last")  # a resumed run logs a step again
        flops = frame["tokens"].astype(float) * float(row["flops"])
        frames.append(frame.assign(cell=row["cell"], arm=row["arm"], seed=row["seed"], flops=flops))
    return pd.concat(frames, ignore_index=True)


def _values(point: dict[str, Any]) -> Iterator[tuple[float, float, float, str, int, float]]:
    step, tokens, seconds = (_number(point.get(key)) for key in ("step", "tokens", "seconds"))
    for key, value in point.items():
        if "/" not in key or math.isnan(number := _number(value)):
            continue
        match = LAYER.match(key)
        metric, layer = (match["metric"], int(match["layer"])) if match else (key, -1)
        yield step, tokens, seconds, metric, layer, number
