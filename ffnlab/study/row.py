"""One row of a study's table: what ``study.json`` says of a cell, together with the cell's own records."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ffnlab import records

# Settings that name a cell, a machine or a way to log it; they never make two cells two different blocks.
NOT_SETTINGS = re.compile(
    r"^(ffn|seed|init_seed|data_seed|study|name|resume|retry|stale|analysis|baseline|kind|experiment)$"
    r"|^(hydra|logger|trainer(?!\.precision)|paths|ffn\.(name|target|_target_)|train\.(log_every|val_every|val_batch_size|compile|checkpoint_blocks))(/|\.|$)"
)


def number(value: Any) -> float:
    """A figure; what is no number, or none that arithmetic can take, is NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= records.LARGEST:
        return math.nan
    return float(value)


def read_row(run_dir: Path, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """One row: what the manifest says of a cell together with the cell's own records."""
    run = records.read(run_dir / "run.json") if (run_dir / "run.json").exists() else {}
    result = entry.get("result") or {}
    if (run_dir / "result.json").exists():
        result = records.read(run_dir / "result.json")
    config = _config(run_dir)
    budget, hashes = run.get("budget") or {}, run.get("hashes") or {}
    git, hardware = run.get("git") or {}, run.get("hardware") or {}
    seed = entry.get("seed", run.get("seed", config.get("seed", 0)))
    loss = number(result.get("val/loss"))
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
        "lr": number(_parse(settings.get("optim.lr", config.get("optim.lr")))),
        "status": status,
        "stale": entry.get("status") == "stale" or bool(entry.get("stale", False)),
        "error": str(entry.get("error") or run.get("error") or _divergence(run)),
        "loss": loss,
        "perplexity": number(result.get("val/perplexity")),
        "bpb": number(result.get("val/bpb")),
        "seconds": number(result.get("seconds", run.get("seconds"))),
        "tokens_per_s": number(result.get("tokens_per_s")),
        "steps": number(result.get("steps", run.get("steps"))),
        "tokens": number(result.get("tokens", run.get("tokens"))),
        "d_ff": number(budget.get("d_ff")),
        "params": number((run.get("parameters") or {}).get("total")),
        "ffn_params": number(budget.get("params")),
        "flops": number(run.get("flops_per_token")),
        "mismatch": number(budget.get("mismatch")),
        "matched": budget.get("matched"),
        "budget": str(budget.get("kind", "")),
        "revision": str(git.get("revision") or ""),
        "dirty": bool(git.get("dirty", False)),
        "code": str(run.get("code") or ""),
        "package_code": str(run.get("package_code") or ""),
        "unigram": number(run.get("unigram_loss")),
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
    return dict(_flatten(records.read(path))) if path.exists() else {}


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
    except (TypeError, ValueError, OverflowError):
        return None
