"""The noise floor: how far apart two runs of the same block land, from init_seed crossed with data_seed.

Two-way random effects without replication: loss = mean + init + data + rest. Mean squares come from statsmodels; a
component is (its mean square - that of the rest) / levels, and a negative one is reported as 0, which is what
it estimates. The rest holds the interaction of both seeds and whatever else is not reproducible.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from ffnlab.errors import UserError
from ffnlab.study.power import seeds_needed
from ffnlab.study.statistics import LEVEL, MIN_SEEDS, NOT_RESOLVED, compare

GAPS = (0.005, 0.01, 0.02, 0.05, 0.1)
MAX_PAIRS = 1_000


@dataclass(frozen=True)
class Component:
    """One source of variance. ``sd`` in nats per token; ``p`` (F test) asks whether it is there (NaN for the rest)."""

    source: str
    mean_square: float
    df: int
    variance: float
    sd: float
    share: float
    p: float
    negative: bool


@dataclass(frozen=True)
class NoiseFloor:
    """What one block's losses say about chance alone."""

    grid: pd.DataFrame  # init_seed down, data_seed across
    mean: float
    components: list[Component]
    sd: float  # of a run with its own init_seed and data_seed
    arm_size: int
    pairs: int
    aa_differences: list[float]  # |difference in means| of two arms of `arm_size` runs without a common seed
    aa_resolved: int | None  # how many of them the verdict would call different; None where arms are under 3 seeds
    chance_gap: dict[int, float]  # seeds a block -> gap that identical blocks exceed in 5% of studies
    seeds_for_gap: dict[float, dict[int, int | None]]  # gap -> {comparisons: seeds a block, 80% power}


def noise_floor(cells: pd.DataFrame) -> NoiseFloor:
    """Variance components from cells with columns init_seed, data_seed and loss (NaN: no result).

    Raises:
        UserError: fewer than two levels of either seed, or holes in the grid.
    """
    finished = cells.dropna(subset=["loss"])
    grid = finished.pivot_table(index="init_seed", columns="data_seed", values="loss", aggfunc="mean")
    rows, columns = grid.shape
    if rows < 2 or columns < 2:
        raise UserError("A noise floor needs at least two init seeds crossed with two data seeds.")
    if grid.isna().any().any():
        raise UserError(
            f"The noise floor's grid of {rows} init seeds by {columns} data seeds has {int(grid.isna().sum().sum())} "
            "cells without a result; run the study again to fill them."
        )
    components = _components(grid)
    sd = math.sqrt(sum(c.variance for c in components))
    z = float(stats.norm.isf((1 - LEVEL) / 2))
    size, differences, resolved = _aa(grid.to_numpy())
    return NoiseFloor(
        grid=grid,
        mean=float(grid.to_numpy().mean()),
        components=components,
        sd=sd,
        arm_size=size,
        pairs=len(differences),
        aa_differences=differences,
        aa_resolved=resolved,
        chance_gap={n: z * sd * math.sqrt(2 / n) for n in (1, 3, 4, 6, 8, 10)},
        seeds_for_gap={gap: {m: seeds_needed(gap, sd, sd, m) for m in (1, 7)} for gap in GAPS},
    )


def _components(grid: pd.DataFrame) -> list[Component]:
    long = grid.rename_axis(index="init").reset_index().melt("init", var_name="data", value_name="loss")
    table = anova_lm(ols("loss ~ C(init) + C(data)", long).fit())
    table["mean_sq"] = table["sum_sq"] / table["df"]
    rest = float(table.loc["Residual", "mean_sq"])
    rows, columns = grid.shape
    parts = [("init_seed", "C(init)", columns), ("data_seed", "C(data)", rows), ("both together", "Residual", 1)]
    raw = {
        source: rest if key == "Residual" else (float(table.loc[key, "mean_sq"]) - rest) / levels
        for source, key, levels in parts
    }
    total = sum(max(0.0, value) for value in raw.values())
    return [
        Component(
            source=source,
            mean_square=float(table.loc[key, "mean_sq"]),
            df=int(table.loc[key, "df"]),
            variance=max(0.0, raw[source]),
            sd=math.sqrt(max(0.0, raw[source])),
            share=max(0.0, raw[source]) / total if total > 0 else math.nan,
            p=float(table.loc[key, "PR(>F)"]),
            negative=raw[source] < 0,
        )
        for source, key, _ in parts
    ]


def _aa(losses: np.ndarray) -> tuple[int, list[float], int | None]:
    """Two arms of one block whose runs share no seed: two blocks of a study if blocks made no difference.

    Arms are drawn from the grid: run k of an arm has its own init_seed and its own data_seed. All of them are
    counted where they are few, else 1,000 drawn by a fixed generator. They overlap between pairs, so their spread
    is a picture and no test.
    """
    rows, columns = losses.shape
    size = min(rows, columns) // 2
    rng = np.random.default_rng(0)
    arms: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if math.perm(rows, 2 * size) * math.perm(columns, 2 * size) <= 50_000:
        arms = list(
            itertools.product(
                itertools.permutations(range(rows), 2 * size), itertools.permutations(range(columns), 2 * size)
            )
        )
        # The same pair of arms turns up once for each order of its runs and of the two arms.
        unique = {
            frozenset(
                (frozenset(zip(i[:size], j[:size], strict=True)), frozenset(zip(i[size:], j[size:], strict=True)))
            )
            for i, j in arms
        }
        pairs = sorted([sorted(sorted(arm) for arm in pair) for pair in unique])
    else:
        drawn = [(rng.permutation(rows)[: 2 * size], rng.permutation(columns)[: 2 * size]) for _ in range(MAX_PAIRS)]
        pairs = [
            [list(zip(i[:size], j[:size], strict=True)), list(zip(i[size:], j[size:], strict=True))] for i, j in drawn
        ]
    stacked = np.array([[[losses[i, j] for i, j in arm] for arm in pair] for pair in pairs])
    means = stacked.mean(-1)
    differences = np.abs(means[:, 0] - means[:, 1])
    resolved = None
    if size >= MIN_SEEDS:
        verdict = compare({"a": stacked[:, 0], "b": stacked[:, 1]}, "a")["b"].verdict
        resolved = int((verdict != NOT_RESOLVED).sum())
    return size, [float(d) for d in differences], resolved
