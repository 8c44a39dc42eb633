"""The per-neuron table on disk: one parquet file a census while a run goes on, joined when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ffnlab.census.figures import COLUMNS, Columns


def with_moment(table: Columns, step: int, final: bool) -> Columns:
    """Add the columns `step` and `final`."""
    rows = len(table["neuron"])
    return table | {"step": np.full(rows, step), "final": np.full(rows, final)}


def write(table: Columns, path: Path) -> None:
    """Write a table atomically; what is missing (NaN) becomes null."""
    columns = {name: pa.array(table[name], from_pandas=True) for name in COLUMNS}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(path)


def read(path: Path) -> Columns:
    """Read a table; nulls become NaN."""
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def join(tables: Iterable[Columns]) -> Columns:
    """Put tables under each other."""
    parts = list(tables)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def moments(table: Columns) -> list[tuple[int, bool]]:
    """The censuses a table holds, as (step, final), in order."""
    pairs = zip(table["step"].tolist(), table["final"].tolist(), strict=True)
    return sorted(set(pairs))


def at_moment(table: Columns, step: int, final: bool) -> Columns:
    """The rows of one census."""
    rows = (table["step"] == step) & (table["final"] == final)
    return {name: column[rows] for name, column in table.items()}


class TableFile:
    """`census.parquet` of a run, and the folder in which its parts wait until the end.

    A part a census rather than one growing file: parquet cannot be appended to, and a run that is killed and
    resumed simply writes the parts after its checkpoint again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "census.parquet"
        self.parts = run_dir / "census_parts"

    def add(self, table: Columns, step: int, final: bool) -> None:
        """Keep the table of one census."""
        write(with_moment(table, step, final), self.parts / f"{step:09d}{'-final' if final else ''}.parquet")

    def close(self, steps: Iterable[int], last: int) -> None:
        """Join the parts of these steps and of the final census at step `last` into `census.parquet`.

        A file that an earlier sitting has closed already counts as parts; parts of other steps are dropped.
        """
        wanted = [*((step, False) for step in steps), (last, True)]
        have: dict[tuple[int, bool], Columns] = {}
        for path in [self.path, *sorted(self.parts.glob("*.parquet"))]:
            if path.exists():
                table = read(path)
                have |= {moment: at_moment(table, *moment) for moment in moments(table)}
        write(join(have[moment] for moment in wanted if moment in have), self.path)
        for path in self.parts.glob("*.parquet"):
            path.unlink()
        self.parts.rmdir()
