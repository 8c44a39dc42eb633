"""Synthetic study folders with the ledger's exact layout, so that reports can be tested without training."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

EFFECTS = {
    "gelu": 0.0,
    "relu": 0.012,
    "silu": 0.003,
    "glu": -0.02,
    "bilinear": -0.03,
    "reglu": -0.05,
    "geglu": -0.062,
    "swiglu": -0.06,
}
STEPS, TOKENS_PER_STEP = 500, 1024


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:16]


def cell_name(block: str, seed: int, *more: object) -> str:
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', block)}-s{seed}-{_hash(block, seed, *more)[:8]}"


def run_records(
    block: str, seed: int, loss: float, *, study: str, init_seed: int | None = None, data_seed: int | None = None,
    lr: float = 3e-3, n_layers: int = 4, status: str = "finished", **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """run.json of one cell; ``changes`` replaces top-level keys."""
    init_seed = seed if init_seed is None else init_seed
    data_seed = seed if data_seed is None else data_seed
    gated = block.endswith("glu") or block == "bilinear"
    d_ff = 256 if gated else 384
    params = 8 * 96 * 384
    record: dict[str, Any] = {
        "status": status,
        "name": f"{block}-s{seed}",
        "study": study,
        "block": block,
        "seed": seed,
        "init_seed": init_seed,
        "data_seed": data_seed,
        "created": "2025-01-01T00:00:00+00:00",
        "seconds": 31.5 + seed,
        "versions": {"torch": "2.13.0", "lightning": "2.6.6"},
        "git": {"revision": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "code": "c0de" * 4,
        "package_code": "c0de" * 4,
        "hardware": {"device": "cpu", "threads": 1},
        "command": f"python train.py ffn={block} seed={seed}",
        "budget": {
            "kind": "params", "d_ff": d_ff, "params": params, "flops": 2 * params, "reference_params": params,
            "reference_flops": 2 * params, "mismatch": 0.0, "matched": True,
        },
        "parameters": {"embeddings": 6240, "attention": 147456, "ffn": params, "norms": 864, "head": 0,
            "total": 154560 + params,},
        "flops_per_token": 6 * 154560,
        "steps": STEPS,
        "tokens": STEPS * TOKENS_PER_STEP,
        "hashes": {
            "data": _hash("data"), "batches": _hash("batches", data_seed), "shared_init": _hash("init", init_seed),
            "config": _hash(block, seed, lr),
        },
    }  # fmt: skip
    return record | changes


def census_values(block: str, n_layers: int, progress: float, rng: np.random.Generator) -> dict[str, float]:
    gated = block.endswith("glu") or block == "bilinear"
    base = {"relu": 0.12, "reglu": 0.08}.get(block, 0.01)
    values: dict[str, float] = {}
    for layer in range(n_layers):
        dead = base * (1 + layer) / n_layers * (0.3 + 0.7 * progress) * (1 + 0.05 * rng.standard_normal())
        values[f"dead/rel_L{layer}"] = dead
        if block in ("relu", "reglu"):
            values[f"dead/exact_L{layer}"] = 0.9 * dead
            values[f"sparsity/zero_L{layer}"] = 0.6 + 0.05 * layer
        values[f"sparsity/rel_L{layer}"] = (0.62 if block in ("relu", "reglu") else 0.02) + 0.04 * layer
        values[f"dormant/rate_L{layer}"] = dead / 2
        if block != "bilinear":
            values[f"gate/never_open_L{layer}"] = dead * (0.8 if gated else 0.7)
    for name in {key.rsplit("_L", 1)[0] for key in values}:
        values[name] = float(np.mean([values[f"{name}_L{layer}"] for layer in range(n_layers)]))
    return values


def write_cell(
    folder: Path, block: str, seed: int, loss: float, *, name: str, study: str, n_layers: int = 4, lr: float = 3e-3,
    status: str = "finished", **changes: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """One run directory; returns its result, or None where it did not finish."""
    rng = np.random.default_rng([seed, len(block)])
    folder = folder / name
    folder.mkdir(parents=True)
    run = run_records(block, seed, loss, study=study, lr=lr, status=status, **changes)
    (folder / "run.json").write_text(json.dumps(run))
    config = {
        "seed": seed, "init_seed": run["init_seed"], "data_seed": run["data_seed"], "study": study,
        "ffn": {"name": block, "target": "ffnlab.ffn.DenseFFN", "options": {}, "down_init": "scaled"},
        "model": {"d_model": 96, "n_layers": n_layers}, "optim": {"lr": lr},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines: list[dict[str, Any]] = []
    last = STEPS if status == "finished" else STEPS // 2
    speed = 16000.0 if block in ("gelu", "relu", "silu") else 14500.0
    for step in range(0, last + 1, 25):
        tokens = step * TOKENS_PER_STEP
        at = {"step": step, "tokens": tokens, "seconds": tokens / speed}
        level = loss + (4.2 - loss) * math.exp(-step / 70)
        if step:
            lines.append(
                at
                | {
                    "train/loss": level + 0.02 * rng.standard_normal(),
                    "lr": lr,
                    "grad_norm": 0.5,
                    "tokens_per_s": speed,
                    "flops": tokens * run["flops_per_token"],
                }
            )
        if step % 50 == 0:
            lines.append(at | {"val/loss": loss if step == STEPS else level, "val/tokens": 32768})
            lines.append(
                {"step": step, "tokens": tokens, "census/n": 8192} | census_values(block, n_layers, step / STEPS, rng)
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status != "finished":
        return None
    result = {
        "val/loss": loss, "val/perplexity": math.exp(loss), "val/bpb": loss / math.log(2), "val/tokens": 111540,
        "train/loss": loss - 0.1, "steps": STEPS, "tokens": STEPS * TOKENS_PER_STEP, "seconds": run["seconds"],
        "tokens_per_s": speed, "flops": STEPS * TOKENS_PER_STEP * run["flops_per_token"], "census/n": 65536,
    } | census_values(block, n_layers, 1.0, rng)  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return result


def losses(
    blocks: Mapping[str, float], seeds: Sequence[int], sd: float = 0.015, correlation: float = 0.0, rng_seed: int = 0
) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(rng_seed)
    common = rng.standard_normal(len(seeds))
    return {
        block: {
            seed: 1.9
            + effect
            + sd * float(math.sqrt(correlation) * c + math.sqrt(1 - correlation) * rng.standard_normal())
            for seed, c in zip(seeds, common, strict=True)
        }
        for block, effect in blocks.items()
    }


def write_study(
    folder: Path,
    values: Mapping[str, Mapping[int, float]] | None = None,
    *,
    analysis: str = "unpaired",
    baseline: str | None = "gelu",
    manifest: bool = True,
    overrides: Mapping[str, Sequence[str]] | None = None,
    cell_changes: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    **top: Any,
) -> Path:
    """A study folder: ``values[block][seed]`` is a cell's final loss. ``cell_changes`` alters single cells."""
    values = values or losses(EFFECTS, range(6))
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict[str, Any] = {}
    for block, by_seed in values.items():
        for seed, loss in by_seed.items():
            change = dict((cell_changes or {}).get((block, seed), {}))
            status = str(change.pop("status", "finished"))
            name = cell_name(block, seed)
            own = [f"ffn={block}", f"seed={seed}", f"study={folder.name}", *(overrides or {}).get(block, ())]
            entry: dict[str, Any] = {
                "block": block,
                "seed": seed,
                "overrides": own,
                "status": status,
                "seconds": None,
                "result": None,
                "error": None,
            }
            if status != "missing":
                own_status = change.pop("run_status", status)
                error = change.pop("error", None)
                result = write_cell(
                    folder, block, seed, loss, name=name, study=folder.name, status=own_status, **change
                )
                entry |= {"seconds": 31.5 + seed, "result": result, "error": error}
            cells[name] = entry
    if manifest:
        record = {
            "study": folder.name, "command": f"python train.py -m ffn={','.join(values)} study={folder.name}",
            "created": "2025-01-01T00:00:00+00:00", "analysis": analysis, "baseline": baseline, "cells": cells,
        }  # fmt: skip
        (folder / "study.json").write_text(json.dumps(record | top))
    return folder


def write_grid(folder: Path, losses_by_pair: np.ndarray, block: str = "gelu") -> Path:
    """A noise-floor study: one block, init_seed down, data_seed across."""
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict[str, Any] = {}
    for (i, j), loss in np.ndenumerate(losses_by_pair):
        name = cell_name(block, 0, i, j)
        result = write_cell(
            folder, block, 0, float(loss), name=name, study=folder.name, init_seed=int(i), data_seed=int(j)
        )
        cells[name] = {
            "block": block, "seed": 0, "overrides": [f"ffn={block}", f"init_seed={i}", f"data_seed={j}"],
            "status": "finished", "seconds": 31.5, "result": result, "error": None,
        }  # fmt: skip
    record = {
        "study": folder.name,
        "command": "python train.py -m experiment=noise_floor",
        "created": "2025-01-01T00:00:00+00:00",
        "analysis": "unpaired", "baseline": block, "cells": cells,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(record))
    return folder


def write_rates(folder: Path, table: Mapping[tuple[str, float, int], float | None], **top: Any) -> Path:
    """A learning-rate study: ``table[block, lr, seed]`` is the final loss, None for a diverged cell."""
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict[str, Any] = {}
    for (block, lr, seed), loss in table.items():
        name = cell_name(block, seed, lr)
        status = "finished" if loss is not None else "diverged"
        result = write_cell(folder, block, seed, loss or 9.0, name=name, study=folder.name, lr=lr, status=status)
        cells[name] = {
            "block": block, "seed": seed, "overrides": [f"ffn={block}", f"seed={seed}", f"optim.lr={lr}"],
            "status": status, "seconds": 31.5, "result": result, "error": None,
        }  # fmt: skip
    record = {
        "study": folder.name,
        "command": "python train.py -m experiment=lr_sensitivity",
        "created": "2025-01-01T00:00:00+00:00",
        "analysis": "unpaired", "baseline": "gelu", "cells": cells,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(record | top))
    return folder
