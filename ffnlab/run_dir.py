"""Whether a run can be written where it is meant to go, asked before any time is spent."""

import tempfile
from pathlib import Path

from ffnlab.errors import UserError


def check_run_dir(run_dir: Path) -> None:
    """Try to write in the nearest folder that exists; permissions alone do not tell (root, network disks, full ones).

    Raises:
        UserError: the name is not allowed, or nothing can be written there.
    """
    if any(character in run_dir.name for character in "= "):
        raise UserError(f"the run directory's name '{run_dir.name}' must not hold '=' or spaces")
    place = run_dir.absolute()
    try:
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise UserError(f"cannot write to the run directory {run_dir}: {place} is not a folder")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {place}: {error.strerror}") from error
