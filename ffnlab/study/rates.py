"""Each block at its own learning rate: the rate is chosen on tuning seeds, the comparison made on fresh ones.

Choosing and comparing on the same seeds would flatter every block by the luck of its best rate, and more so the
blocks whose losses vary more.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffnlab.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rate:
    """One arm's choice. ``lr`` is None where no rate finished on every tuning seed."""

    arm: str
    lr: float | None
    loss: float  # mean over the tuning seeds at that rate
    tried: list[float]
    lost: list[float]  # rates left out because a tuning cell diverged, failed or is missing
    at_edge: bool


def split_seeds(seeds: list[int], tuning: list[int] | None = None) -> tuple[list[int], list[int]]:
    """Tuning seeds and fresh seeds; the lowest third (rounded up) is for tuning where a study did not declare them.

    Raises:
        UserError: nothing is left on one of the two sides.
    """
    seeds = sorted(set(seeds))
    if tuning is None:
        tuning = seeds[: math.ceil(len(seeds) / 3)]
    chosen = [seed for seed in seeds if seed in set(tuning)]
    fresh = [seed for seed in seeds if seed not in set(tuning)]
    if not chosen or not fresh:
        raise UserError(
            f"Choosing rates needs tuning seeds and fresh seeds; of the study's seeds {seeds} "
            f"the tuning seeds {sorted(tuning)} leave one side empty."
        )
    return chosen, fresh


def choose_rates(cells: "pd.DataFrame", tuning: list[int]) -> list[Rate]:
    """For each arm the rate with the lowest mean loss over the tuning seeds (a tie goes to the lower rate)."""
    result = []
    for arm in dict.fromkeys(cells["arm"]):
        own = cells[(cells["arm"] == arm) & cells["seed"].isin(tuning)]
        losses = own.pivot_table(index="lr", columns="seed", values="loss", aggfunc="first", dropna=False)
        losses = losses.reindex(index=sorted(own["lr"].dropna().unique()), columns=tuning)
        means = losses.mean(axis=1, skipna=False)
        tried = [float(lr) for lr in losses.index]
        lost = [float(lr) for lr in losses.index[means.isna()]]
        if means.notna().any():
            lr = float(means.idxmin())
            result.append(
                Rate(arm, lr, float(means.min()), tried, lost, len(tried) > 1 and lr in (tried[0], tried[-1]))
            )
        else:
            result.append(Rate(arm, None, math.nan, tried, lost, False))
    return result


def fresh_cells(cells: "pd.DataFrame", rates: list[Rate], fresh: list[int]) -> "pd.DataFrame":
    """The cells to compare: fresh seeds, each arm at its chosen rate. An arm without a rate has none."""
    chosen = {rate.arm: rate.lr for rate in rates}
    at_rate = cells["lr"].eq(cells["arm"].map(chosen).astype(float))
    return cells[at_rate & cells["seed"].isin(fresh)]
