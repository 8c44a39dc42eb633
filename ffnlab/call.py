"""Commands that are printed, so that they can be pasted where the last one was typed.

That need not be the project's own folder, and its Python need not be the one that ``python`` names there.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def call(script: str, *arguments: str | Path) -> str:
    """A command for one of the project's scripts: ``python ../ffnlab/scripts/report.py outputs/first``."""
    python = "python" if Path(sys.executable).with_name("python").exists() else Path(sys.executable).name
    return shlex.join([program(python), _from_here(ROOT / script), *map(str, arguments)])


def program(name: str) -> str:
    """A program of this Python's environment, with its folder where its name alone would find another or none."""
    folder = Path(sys.executable).parent
    found = shutil.which(name)
    if (found is not None and Path(found).parent == folder) or not (folder / name).exists():
        return name
    return _from_here(folder / name)


def override(key: str, value: str | Path) -> str:
    """``key=value`` as Hydra takes it, with quotes of Hydra's own where its grammar would trip over the value."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9/_.+-]+", text):
        # A backslash is itself in Hydra's strings, but for those in front of a quote.
        text = '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'
    return f"{key}={text}"


def _from_here(path: Path) -> str:
    """A path as short as it can be said from the current folder."""
    relative = os.path.relpath(path)
    return min(relative, str(path), key=len) if relative.startswith("..") else relative
