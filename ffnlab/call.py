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
CONF = ROOT / "conf"
_INT = r"(0|[1-9](_?\d)*)"
_POINT = rf"({_INT}\.|{_INT}?\.\d(_?\d)*)"
# What Hydra reads as a number: 2026, 1_000 and 1e5, but not 007.
NUMBER = re.compile(rf"[+-]?({_INT}|{_POINT}|({_INT}|{_POINT})e[+-]?\d(_?\d)*|inf|nan)", re.IGNORECASE)


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
    plain = re.fullmatch(r"[A-Za-z0-9/_.+-]+", text) and text.lower() not in ("null", "true", "false")
    if plain and not NUMBER.fullmatch(text):
        return f"{key}={text}"
    text = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)  # it would be filled in
    return f"{key}={quoted(text)}"


def quoted(text: str) -> str:
    """``text`` as a string of Hydra's grammar: a backslash is itself in it, but for those in front of a quote."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def _from_here(path: Path) -> str:
    """A path as short as it can be said from the current folder."""
    relative = os.path.relpath(path)
    return min(relative, str(path), key=len) if relative.startswith("..") else relative
