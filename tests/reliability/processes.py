"""Real processes that run ``train.py``'s command line, started quickly from one that has everything imported."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ffnlab.training.checkpoints import load_checkpoint
from ffnlab.training.ledger import read_points

# d_ff 64 is exact at d_model 24 for gated and dense blocks' budgets; a copy-task row has 17 tokens
TINY = [
    "data=copy",
    "model.d_model=24",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.context_length=32",
    "train.batch_size=8",
    "train.tokens=5440",  # 40 steps
    "train.val_every=10",
    "train.log_every=3",
    "optim.warmup=5",
    "census.tokens=128",
    "census.final_tokens=256",
    "logger=none",
]
TIMINGS = {"seconds", "tokens_per_s", "timing"}
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["ffnlab.training", "ffnlab.cli", "ffnlab.census.picture", "wandb"])


class Run:
    """One process with ``train.py ARGS`` in it; it prints into a file. ``NAME=""`` unsets a variable."""

    def __init__(self, folder: Path, args: Sequence[str], before: Callable[[], None] | None = None, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._process = _FORKS.Process(target=_command_line, args=(folder, list(args), before, env))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, patience: float = 120) -> int:
        """The exit code; negative for a signal that killed it."""
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"still running after {patience} s\n{self.said}")
        code = self._process.exitcode
        assert code is not None
        return code

    @property
    def said(self) -> str:
        """What it has printed."""
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")


def _command_line(folder: Path, args: list[str], before: Callable[[], None] | None, env: dict[str, str]) -> None:
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name, value in env.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    os.chdir(folder)
    sys.argv = ["train.py", *args]
    # what a fresh interpreter has, whatever pytest made of it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    torch.set_num_threads(1)
    if before is not None:
        before()
    from ffnlab.cli import main

    sys.exit(main())


def train_cli(folder: Path, args: Sequence[str], before: Callable[[], None] | None = None, **env: str) -> Run:
    """Run to the end with success."""
    run = Run(folder, args, before, **env)
    assert run.wait() == 0, run.said
    return run


def until(condition: Callable[[], bool], patience: float = 60) -> None:
    """Wait for something another process does."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.005)


def steps_logged(run_dir: Path) -> int:
    """The last step in ``metrics.jsonl``, -1 before there is one."""
    points = read_points(run_dir)
    return max((int(point["step"]) for point in points), default=-1)


def record(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    return content


def without_timings(value: dict[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in value.items() if key not in TIMINGS}


def digest(value: Any) -> str:
    """Hash of tensors and plain values, to the bit."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        sha.update(str((value.dtype, tuple(value.shape))).encode())
        sha.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value.keys() - TIMINGS, key=str):
            sha.update(str(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        sha.update(str(len(value)).encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())


def remains(run_dir: Path) -> dict[str, Any]:
    """All that a finished run leaves, without its timings: hashes of files, and the points themselves."""
    from ffnlab.census.table import read

    checkpoints = run_dir / "checkpoints"
    last, best = load_checkpoint(checkpoints / "last.ckpt"), load_checkpoint(checkpoints / "best.ckpt")
    table = read(run_dir / "census.parquet")
    return {
        "weights": digest(load_file(checkpoints / "final.safetensors")),
        "last weights": digest(last["state_dict"]),
        "optimiser": digest(last["optimizer_states"]),
        "schedule": digest(last["lr_schedulers"]),
        "callbacks": digest(last["callbacks"]),
        "best weights": digest(best["state_dict"]),
        "best step": best["global_step"],
        "census": digest({name: torch.tensor(column.astype("float64")) for name, column in table.items()}),
        "points": [without_timings(point) for point in read_points(run_dir)],
        "result": without_timings(json.loads((run_dir / "result.json").read_text())),
    }
