"""What every test shares: one thread each, no network, one token cache, no key of anybody's."""

import os

# Before torch is imported, and inherited by every process a test starts: tests run side by side on few cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("WANDB_API_KEY", None)

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token cache of the test session's own, shared by its processes and by what they start."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    os.environ["FFNLAB_CACHE"] = str(shared / "token-cache")
    return shared / "token-cache"


@pytest.fixture(scope="session")
def play_text() -> str:
    """A few thousand words that never change: enough for a tiny run."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "seven",
        "wise",
        "owls",
        "judge",
        "my",
        "old",
        "sphinx",
        "of",
        "black",
        "quartz",
    ]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) + "\n" for i in range(1, 1200)]
    return "".join(lines)


@pytest.fixture
def text_file(tmp_path: Path, play_text: str) -> Path:
    """A user's own text file."""
    path = tmp_path / "text.txt"
    path.write_text(play_text, encoding="utf-8")
    return path


@pytest.fixture
def tiny(text_file: Path) -> list[str]:
    """Overrides for a run of a few steps on a network of a few thousand parameters."""
    return [
        "data=text",
        f"data.paths='{text_file}'",
        "data.tokenizer.kind=bytes",
        "model.d_model=24",
        "model.n_layers=2",
        "model.n_heads=2",
        "model.context_length=16",
        "train.tokens=256",
        "train.batch_size=4",
        "train.log_every=1",
        "train.val_every=2",
        "train.val_tokens=512",
        "census.tokens=256",
        "census.final_tokens=512",
        "optim.warmup=1",
        "trainer=cpu",
        "logger=none",
    ]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """Run one of the project's scripts in a real process, in a folder of the test's own."""

    def run(
        script: str, *arguments: str, timeout: float = 180, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(ROOT / script), *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
