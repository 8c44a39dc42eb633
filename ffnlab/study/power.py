"""What a study of this size can resolve, and how many seeds an observed difference would need.

Power is that of the t test at the first step of Holm, ``alpha / blocks``: the hurdle that the first block to be called
different has to take. Noncentral t from statsmodels, with the degrees of freedom that the verdict uses.
"""

import math
from collections.abc import Callable

from scipy import optimize
from statsmodels.stats.power import ttest_power

from ffnlab.study.statistics import LEVEL, MIN_SEEDS, guarded_df

POWER = 0.8
MAX_SEEDS = 1_000


def _power(difference_in_se: float, df: float, alpha: float) -> float:
    # With nobs=1 the effect size is the noncentrality itself, so one function serves Welch and paired tests.
    # One tail of the two-sided test: a difference found with the wrong sign is not found (and nct is NaN there).
    return float(ttest_power(difference_in_se, nobs=1, alpha=alpha / 2, df=df, alternative="larger"))


def detectable_difference(se: float, df: float, blocks: int = 1) -> float:
    """The smallest true difference found with 80% power, given the standard error of the difference.

    ``blocks`` is the number of comparisons that Holm runs over. Same unit as ``se``; NaN where ``se`` is not positive.
    """
    if not (se > 0 and df > 0):
        return math.nan
    alpha = (1 - LEVEL) / max(1, blocks)
    high = 4.0
    while _power(high, df, alpha) < POWER:
        high *= 2
    root = optimize.brentq(lambda d: _power(d, df, alpha) - POWER, 1e-6, high, xtol=1e-6)
    return float(root) * se


def _seeds(size: Callable[[int], tuple[float, float]], alpha: float) -> int | None:
    """Smallest n from three up whose (difference in standard errors, df) has the power; None above 1,000."""

    def enough(n: int) -> bool:
        return _power(*size(n), alpha) >= POWER

    low, high = MIN_SEEDS - 1, MIN_SEEDS
    while not enough(high):
        low, high = high, high * 2
        if low >= MAX_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= MAX_SEEDS else None


def seeds_needed(difference: float, sd: float, sd_baseline: float, blocks: int = 1) -> int | None:
    """Seeds a block that would resolve ``difference`` with 80% power, unpaired. None: more than 1,000, or no SD."""
    total = sd**2 + sd_baseline**2
    if not (abs(difference) > 0 and total > 0):
        return None

    def size(n: int) -> tuple[float, float]:
        welch = (n - 1) * total**2 / (sd**4 + sd_baseline**4)
        return abs(difference) / math.sqrt(total / n), float(guarded_df(welch, n, n))

    return _seeds(size, (1 - LEVEL) / max(1, blocks))


def seeds_needed_paired(difference: float, sd: float, blocks: int = 1) -> int | None:
    """Seeds that would resolve a mean per-seed difference with standard deviation ``sd``, with 80% power."""
    if not (abs(difference) > 0 and sd > 0):
        return None
    return _seeds(lambda n: (abs(difference) / sd * math.sqrt(n), n - 1.0), (1 - LEVEL) / max(1, blocks))
