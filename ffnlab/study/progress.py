"""How a study stands, read from its directories while it runs: which cell is at which step, and for how long yet."""

import contextlib
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ffnlab.errors import UserError
from ffnlab.records import STUDY, read_study
from ffnlab.study.cells import is_running, look
from ffnlab.study.row import number

TAIL_BYTES = 65_536
STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "diverged": "red",
    "damaged": "red",
    "stopped": "yellow",
}


@dataclass(frozen=True)
class CellProgress:
    """One cell. ``status``: finished, running, stopped (half done, no process has it), waiting, failed, diverged,
    damaged.

    ``seconds`` is time spent, ``left`` an estimate from the steps so far; None where there is nothing to tell it from.
    """

    name: str
    block: str
    status: str
    step: int
    steps: int
    seconds: float
    left: float | None
    loss: float | None
    error: str


def survey(study_dir: Path) -> list[CellProgress]:
    """Every cell of a study, in the study's order.

    Raises:
        UserError: there is no study there.
    """
    path = study_dir / STUDY
    if not path.exists():
        raise UserError(f"{study_dir} is no study: it has no {STUDY}. Give the folder, as in outputs/NAME.")
    manifest, damaged = read_study(path)
    return [_progress(study_dir, name, entry, damaged.get(name, "")) for name, entry in manifest["cells"].items()]


def _progress(study_dir: Path, name: str, entry: dict[str, Any], damaged: str) -> CellProgress:
    run_dir = study_dir / name
    state = look(run_dir, entry)
    status: str = state.status
    if status in ("missing", "unfinished"):
        damaged = damaged or state.damaged
        idle = "damaged" if damaged else "stopped" if status == "unfinished" else "waiting"
        status = "running" if is_running(study_dir, name) else idle
    point = _last_point(run_dir / "metrics.jsonl")
    step, steps = int(point.get("step", 0)), int(state.record.get("steps") or 0)
    seconds = float(point.get("seconds", 0.0))
    left = seconds / step * (steps - step) if step and steps and status in ("running", "stopped") else None
    loss = number(state.result.get("val/loss", point.get("train/loss")))
    if status == "finished":
        step, seconds = int(state.result.get("steps", steps)), float(state.result.get("seconds") or 0.0)
    known = None if math.isnan(loss) else loss
    error = damaged if status == "damaged" else state.error
    return CellProgress(name, str(entry.get("block", "")), status, step, steps, seconds, left, known, error)


def _last_point(path: Path) -> dict[str, Any]:
    """The last whole training or validation point; only the end of the file is read."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            point = json.loads(line)
            if isinstance(point, dict) and not math.isnan(number(point.get("step")) + number(point.get("seconds"))):
                return point
    return {}


def time_left(cells: list[CellProgress]) -> float | None:
    """Seconds until the study is done at the number of cells that run now; None where that cannot be told."""
    running = [cell for cell in cells if cell.status == "running"]
    done = [cell.seconds for cell in cells if cell.status == "finished" and cell.seconds]
    whole = [c.seconds + c.left for c in cells if c.left is not None] + done
    if not running or not whole:
        return None
    mean = statistics.fmean(whole)
    waiting = [mean for cell in cells if cell.status == "waiting"]
    stopped = [cell.left or mean for cell in cells if cell.status == "stopped"]
    begun = [cell.left if cell.left is not None else mean for cell in running]
    return max(sum(begun + waiting + stopped) / len(running), max(begun))


def view(study_dir: Path) -> tuple[RenderableType, bool]:
    """What to print, and whether anything is still running."""
    cells = survey(study_dir)
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.status] = counts.get(cell.status, 0) + 1
    head = Text(f"{study_dir.name}: {len(cells)} cells, ")
    head.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    left = time_left(cells)
    if left is not None:
        head.append(f"; about {duration(left)} left")
    parts: list[RenderableType] = [head]
    shown = [cell for cell in cells if cell.status not in ("finished", "waiting")]
    if shown:
        parts.append(_cells_table(shown))
    partial = _partial_table(study_dir)
    if partial is not None:
        parts.append(partial)
    if counts.get("stopped") or counts.get("damaged") or (counts.get("waiting") and not counts.get("running")):
        parts.append(Text("run the study's command again to go on", style="dim"))
    return Group(*parts), bool(counts.get("running"))


def _cells_table(cells: list[CellProgress]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "status", "step", "time left", "loss", ""):
        table.add_column(column, justify="right" if column in ("step", "time left", "loss") else "left")
    for cell in cells:
        table.add_row(
            cell.name,
            Text(cell.status, style=STYLES.get(cell.status, "")),
            f"{cell.step:,} of {cell.steps:,}" if cell.steps else "",
            duration(cell.left) if cell.left is not None else "",
            f"{cell.loss:.3f}" if cell.loss is not None else "",
            Text(cell.error),
        )
    return table


def _partial_table(study_dir: Path) -> Table | None:
    """Mean and SD of the final validation loss over the seeds that have finished."""
    from ffnlab.study.load import load_study

    try:
        study = load_study(study_dir)
    except UserError:  # a record that is being written at this moment
        return None
    table = Table(box=None, pad_edge=False)
    for column in ("block", "seeds", "val/loss", "SD", "tokens/s"):
        table.add_column(column, justify="left" if column == "block" else "right")
    for arm, rows in study.cells.groupby("arm", sort=False):
        done = rows[rows["status"] == "finished"]
        sd = float(done["loss"].std()) if len(done) > 1 else math.nan
        table.add_row(
            Text(str(arm)),
            f"{len(done)} of {len(rows)}",
            f"{done['loss'].mean():.4f}" if len(done) else "",
            f"{sd:.4f}" if not math.isnan(sd) else "",
            f"{done['tokens_per_s'].mean():,.0f}" if len(done) else "",
        )
    return table


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``12 min``, ``40 s``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
