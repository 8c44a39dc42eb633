"""Studies as commands: in this process, or in real ones that can be killed."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# d_ff is exact at d_model 24 for dense (96) and gated (64) blocks; 17 tokens a row, 8 rows a step: 20 steps.
TINY = [
    "data=copy",
    "model.d_model=24",
    "model.n_layers=1",
    "model.n_heads=2",
    "model.context_length=32",
    "train.batch_size=8",
    "train.tokens=2720",
    "train.val_every=5",
    "train.log_every=1",
    "optim.warmup=5",
    "census.tokens=128",
    "census.final_tokens=256",
    "trainer=cpu",
    "logger=none",
]
BASIC = "hydra/launcher=basic"
TIMINGS = {"seconds", "tokens_per_s", "timing"}

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["ffnlab.training", "ffnlab.study.runner", "ffnlab.census.picture"])


class Command:
    """``train.py ARGS`` in a process and a process group of its own; what it prints goes to ``output.txt``."""

    def __init__(self, folder: Path, args: Sequence[str], before: Callable[[], None] | None = None, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        self._process = _FORKS.Process(target=_command_line, args=(folder, list(args), before, env))
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, signum: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signum)

    def send_to_all(self, signum: int) -> None:
        """As a terminal does, or ``timeout``: to every process that the command has started, too."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, signum)

    def wait(self, patience: float = 400) -> int:
        """The exit code; negative for a signal that killed it."""
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"still running after {patience} s\n{self.said}")
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")


def _command_line(folder: Path, args: list[str], before: Callable[[], None] | None, env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["train.py", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    torch.set_num_threads(1)
    if before is not None:
        before()
    from ffnlab.cli import main

    sys.exit(main())


def manifest(study_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((study_dir / "study.json").read_text(encoding="utf-8"))
    return content


def statuses(study_dir: Path) -> dict[str, str]:
    return {name: entry["status"] for name, entry in manifest(study_dir)["cells"].items()}


def results(study_dir: Path) -> dict[str, dict[str, Any]]:
    """What each cell found, without what depends on the clock; from its own record and, the same, the manifest."""
    found = {}
    for name, entry in manifest(study_dir)["cells"].items():
        own = json.loads((study_dir / name / "result.json").read_text(encoding="utf-8"))
        assert entry["result"] == own
        assert json.loads((study_dir / name / "run.json").read_text(encoding="utf-8"))["status"] == "finished"
        found[name] = {key: value for key, value in own.items() if key not in TIMINGS}
    return found
