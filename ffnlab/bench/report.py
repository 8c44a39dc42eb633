"""The bench's table for people, and its JSON for later comparison."""

import dataclasses
import json
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ffnlab.bench.memory import MemoryPoint
from ffnlab.bench.race import Race, Spread
from ffnlab.bench.split import Split
from ffnlab.bench.studies import Throughput
from ffnlab.bench.targets import Target, judge


@dataclass
class Report:
    """Everything one call of the bench found; parts that were not asked for stay empty."""

    races: list[Race] = field(default_factory=list)
    splits: dict[str, Split] = field(default_factory=dict)
    memory: list[MemoryPoint] = field(default_factory=list)
    startup: dict[str, Spread] = field(default_factory=dict)
    studies: Throughput | None = None
    machine: dict[str, Any] = field(default_factory=lambda: machine())


def machine() -> dict[str, Any]:
    """The machine and how busy it was when the bench began."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def as_dict(report: Report) -> dict[str, Any]:
    """Plain values: every slice of every race, and what the table says."""
    return {
        "machine": report.machine,
        "races": [_race_dict(race) for race in report.races],
        "splits": {
            name: {**dataclasses.asdict(split), "largest_other": split.largest_other}
            for name, split in report.splits.items()
        },
        "memory": [dataclasses.asdict(point) for point in report.memory],
        "startup": {name: dataclasses.asdict(spread) for name, spread in report.startup.items()},
        "studies": dataclasses.asdict(report.studies) | {"ratio": report.studies.ratio} if report.studies else None,
    }


def _race_dict(race: Race) -> dict[str, Any]:
    return {
        "setting": dataclasses.asdict(race.setting),
        "slice_steps": race.slice_steps,
        "tokens_per_step": race.tokens_per_step,
        "records": {name: dataclasses.asdict(record) for name, record in race.records.items()},
        "ms_per_step": {name: dataclasses.asdict(race.ms_per_step(name)) for name in race.records},
        "targets": [dataclasses.asdict(target) | {"met": target.met} for target in judge(race)],
        "validation_seconds": race.validation_seconds("ffnlab") if "ffnlab" in race.records else None,
    }


def write_json(report: Report, path: Path) -> None:
    """Write ``as_dict``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_dict(report), indent=1) + "\n", encoding="utf-8")


def print_report(report: Report, console: Console) -> None:
    """Print every part that was measured."""
    m = report.machine
    console.print(
        f"{m['gpu'] or m['cpu']}, {m['cores']} cores, torch {m['torch']}, load {m['load']:.1f} at the start",
        highlight=False,
    )
    for race in report.races:
        console.print(_race_table(race))
        for line in _race_lines(race):
            console.print(line, highlight=False)
    for name, split in report.splits.items():
        console.print(_split_table(name, split))
    if report.memory:
        console.print(_memory_table(report.memory))
    for name, seconds in report.startup.items():
        console.print(f"{name}: {seconds.median:.2f} s ({seconds.low:.2f} to {seconds.high:.2f})", highlight=False)
    if report.studies is not None:
        s = report.studies
        console.print(
            f"cells an hour ({s.tokens_per_cell:,} tokens each): {s.together:.0f} two at a time with one thread, "
            f"{s.in_turn:.0f} in turn with two threads: {s.ratio:.2f} times",
            highlight=False,
        )


def _spread(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"


def _race_table(race: Race) -> Table:
    s = race.setting
    where = "GPU" if s.device == "cuda" else f"{s.threads} thread{'s' * (s.threads > 1)}"
    clock = ", processor time" if s.clock == "cpu" else ""
    slices = len(next(iter(race.records.values())).seconds)
    table = Table(
        title=f"{s.shape}, ffn={s.ffn}, {where}{clock}: {slices} slices of {race.slice_steps} steps in turns",
        title_justify="left",
    )
    against = "bare" if "bare" in race.records else next(iter(race.records))
    for header in ("contender", "ms a step", "tokens/s", "GFLOP/s", f"speed / {against}", "peak MiB"):
        table.add_column(header, justify="left" if header == "contender" else "right")
    flops = race.records["products"].facts["flops"] if "products" in race.records else None
    for name, record in race.records.items():
        ms = race.ms_per_step(name)
        table.add_row(
            name,
            _spread(ms, 1),
            "" if name == "products" else f"{1e3 * race.tokens_per_step / ms.median:,.0f}",
            f"{flops / ms.median / 1e6:,.0f}" if flops and name not in ("gpt2", "gpt2-gelu", "x-transformers") else "",
            _spread(race.speed(name, against), 3),
            f"{record.facts['peak_bytes'] / 2**20:,.0f}",
        )
    return table


def _race_lines(race: Race) -> list[str]:
    lines = []
    validation = race.validation_seconds("ffnlab") if "ffnlab" in race.records else None
    if validation is not None:
        every = race.setting.config().train.validation_interval(0)
        training = race.ms_per_step("ffnlab").median * every / 1e3
        lines.append(
            f"validation, census and checkpoint: {validation:.2f} s every {every} steps, "
            f"{validation / (validation + training):.1%} of the run"
        )
    if "products" in race.records:
        square = race.records["products"].facts["square_flops_per_s"]
        flops = race.records["products"].facts["step_flops"]
        for name in ("bare", "compile", "liger"):
            if name in race.records:
                rate = flops / race.ms_per_step(name).median * 1e3
                large = f"one large product, {square / 1e9:,.0f} GFLOP/s"
                lines.append(f"{name}: MFU {rate / square:.1%} (against {large}; attention counted)")
    lines += [_target_line(target) for target in judge(race)]
    return lines


def _target_line(target: Target) -> str:
    verdict = "met   " if target.met else "missed"
    return f"{verdict} {target.what}: {_spread(target.measured, 3)}, wanted {target.wanted:.2f}"


def _split_table(name: str, split: Split) -> Table:
    table = Table(title=f"a step, {name}", title_justify="left")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    for phase, spread in split.phases.items():
        table.add_row(phase, _spread(spread, 2))
    table.add_section()
    total = sum(split.kinds.values())
    for kind, ms in sorted(split.kinds.items(), key=lambda item: -item[1]):
        if not ms:
            continue
        mark = "  <- largest that is no matrix product" if kind == split.largest_other else ""
        table.add_row(kind + mark, f"{ms:.2f}  {ms / total:.1%}")
    return table


def _memory_table(points: list[MemoryPoint]) -> Table:
    table = Table(title="peak memory of training, 4,096 tokens a step", title_justify="left")
    for header in ("vocabulary", "context", "blocks recomputed", "MiB"):
        table.add_column(header, justify="right")
    for point in points:
        remade = "yes" if point.checkpoint_blocks else "no"
        table.add_row(f"{point.vocab_size:,}", f"{point.context_length:,}", remade, f"{point.peak_mib:,.0f}")
    return table
