"""How long a person waits: for ``--help``, for the first training step, for the default corpus."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ffnlab.bench.race import Spread
from ffnlab.errors import UserError

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def help_seconds(repeats: int) -> Spread:
    """Wall time of ``python train.py --help``."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([sys.executable, str(TRAIN), "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return Spread.of(times)


def first_step_seconds(repeats: int, overrides: Sequence[str] = ()) -> Spread:
    """From typing ``python train.py`` (W&B offline) to the ledger's first training point, with a warm token cache.

    The validation and census before the first step are in it.

    Raises:
        UserError: the run ended without a training step.
    """
    times = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="ffnlab-bench-") as folder:
            run_dir = Path(folder) / "run"
            command = [sys.executable, str(TRAIN), "train.log_every=1", f"hydra.run.dir={run_dir}", *overrides]
            began = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "WANDB_MODE": "offline"}
            )
            try:
                while not _stepped(run_dir / "metrics.jsonl"):
                    if process.poll() is not None and not _stepped(run_dir / "metrics.jsonl"):
                        said = process.stderr.read().decode() if process.stderr else ""
                        raise UserError(f"train.py ended before its first step: {said.strip()[-300:]}")
                    time.sleep(0.02)
                times.append(time.perf_counter() - began)
            finally:
                process.kill()
                process.wait()
                if process.stderr:
                    process.stderr.close()
    return Spread.of(times)


def _stepped(metrics: Path) -> bool:
    return metrics.exists() and '"train/loss"' in metrics.read_text(encoding="utf-8")


def corpus_seconds() -> float:
    """Prepare the default corpus into an empty cache: read, train the tokenizer, encode."""
    from ffnlab.config import compose
    from ffnlab.data import prepare

    with tempfile.TemporaryDirectory(prefix="ffnlab-bench-") as folder:
        cfg = compose([f"data.cache_dir={folder}"])
        began = time.perf_counter()
        prepare(cfg.data, cfg.model.context_length)
        return time.perf_counter() - began
