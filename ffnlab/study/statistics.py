"""Is a block better than the baseline? Tests, intervals and verdicts over final validation losses.

Everything here is a pure function of arrays; scipy and statsmodels do the statistics. Losses come as one
array a block, ``(..., n)``: seeds last, aligned by seed, and any leading axes are whole studies, so that the
calibration tests push thousands of simulated studies through the very code that judges a real one.
A one-dimensional array may hold NaN where a seed has no result.

Two kinds of interval, and how they go with the verdict:

* ``low, high``: the marginal 95% interval of one difference (Welch, or t of per-seed differences). It covers the true
  difference in about 95% of studies, one block at a time; it makes no promise for all blocks at once.
* ``wide_low, wide_high``: simultaneous 95% intervals (Bonferroni over the tested blocks, with the guarded degrees of
  freedom below). If this one excludes 0, Holm's verdict is `better` or `worse`; if the marginal one includes 0,
  the verdict is never `better` or `worse`. Between the two Holm's step-down decides.

Guarded degrees of freedom. Welch's approximation is anti-conservative in the tail that Holm looks at when n is small
and variances differ much: with 3 seeds and seven blocks whose SDs are four to twelve times the baseline's, 7 to 9% of
studies without any true difference get a verdict at the nominal 5%. The reason is that the Satterthwaite degrees of
freedom are themselves estimated, and come out large just when the larger SD happens to be underestimated. The safe
bound min(n) - 1 (Mickey and Brown 1966) is valid whatever the variances, but costs much power. We go part of the way:

    df = df_min + (df_welch - df_min) (n - 2) / (n + 1),    df_min = n - 1,  n the smaller number of seeds

which holds 5% to within about 0.4 points over SD ratios from 1 to 40 and n from 3 up (tests/study), and is Welch's own
for many seeds. Verdicts and adjusted p use it; ``p`` and the marginal interval are plain Welch.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats
from statsmodels.stats.multitest import multipletests

Array = npt.NDArray[np.float64]

LEVEL = 0.95
MIN_SEEDS = 3
MIN_SEEDS_BCA = 5
MAX_EXACT = 200_000  # arrangements up to which a permutation p is computed exactly
RESAMPLES = 9_999

BETTER, WORSE, NOT_RESOLVED, TOO_FEW = "better", "worse", "not resolved", "too few seeds"


@dataclass(frozen=True)
class Comparison:
    """One block against the baseline. Every field has the leading shape of the losses, ``()`` for one study.

    Differences are block minus baseline in nats per token: negative is better. Fields that need a test are
    NaN where there are too few seeds.
    """

    n: int  # seeds of the block (paired: seeds both have)
    n_baseline: int
    difference: Array
    se: Array
    df: Array  # guarded: what the verdict uses
    p: Array  # plain: scipy's
    p_guarded: Array
    p_adjusted: Array  # Holm over the blocks, of p_guarded
    low: Array
    high: Array
    wide_low: Array
    wide_high: Array
    verdict: npt.NDArray[np.str_]


class Resampled(NamedTuple):
    """A permutation p, whether every arrangement was counted, and the smallest p that n seeds can give."""

    p: float
    exact: bool
    floor: float


class _Test(NamedTuple):
    n: int
    n_baseline: int
    difference: Array
    se: Array
    df: Array
    p: Array
    low: Array
    high: Array


def present(losses: Array) -> Array:
    """Losses without the NaN of absent seeds (one study); a stack of studies is returned as it is."""
    losses = np.asarray(losses, dtype=np.float64)
    return losses[~np.isnan(losses)] if losses.ndim == 1 else losses


def shared_differences(block: Array, baseline: Array) -> Array:
    """Per-seed differences ``(..., n)`` over the seeds that both have."""
    return present(np.asarray(block, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))


def guarded_df(welch: Array | float, n: int, n_baseline: int) -> Array:
    """Degrees of freedom for the verdict: see the module's text."""
    smaller = min(n, n_baseline)
    return np.asarray((smaller - 1) + (welch - (smaller - 1)) * (smaller - 2) / (smaller + 1))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Losses that do not vary make scipy warn; `_tested` deals with them."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _unpaired(block: Array, baseline: Array) -> _Test:
    block, baseline = present(block), present(baseline)
    n, n_baseline = block.shape[-1], baseline.shape[-1]
    if min(n, n_baseline) < MIN_SEEDS:
        return _untested(n, n_baseline, block, baseline)
    with _quiet():
        test = stats.ttest_ind(block, baseline, axis=-1, equal_var=False)
        interval = test.confidence_interval(LEVEL)
        variances = block.var(-1, ddof=1) / n + baseline.var(-1, ddof=1) / n_baseline
    df = guarded_df(np.asarray(test.df), n, n_baseline)
    difference = block.mean(-1) - baseline.mean(-1)
    se = np.sqrt(variances)
    return _tested(n, n_baseline, difference, se, df, test.pvalue, interval.low, interval.high)


def _paired(block: Array, baseline: Array) -> _Test:
    differences = shared_differences(block, baseline)
    n = differences.shape[-1]
    if n < MIN_SEEDS:
        return _untested(n, n, differences, np.zeros_like(differences))
    with _quiet():
        test = stats.ttest_1samp(differences, 0.0, axis=-1)
        interval = test.confidence_interval(LEVEL)
    se = differences.std(-1, ddof=1) / np.sqrt(n)
    df = np.asarray(test.df, dtype=np.float64)
    return _tested(n, n, differences.mean(-1), se, df, test.pvalue, interval.low, interval.high)


def _tested(
    n: int, n_baseline: int, difference: Array, se: Array, df: Array, p: Array, low: Array, high: Array
) -> _Test:
    # Losses that do not vary at all over seeds leave nothing to judge by: that resolves nothing, it proves nothing.
    flat = se <= 1e-12 * np.maximum(1.0, np.abs(difference))
    p = np.where(flat, 1.0, p)
    se = np.where(flat, 0.0, se)
    df = np.where(flat, float(min(n, n_baseline) - 1), df)
    low, high = np.where(flat, np.nan, low), np.where(flat, np.nan, high)
    return _Test(n, n_baseline, difference, se, df, p, low, high)


def _untested(n: int, n_baseline: int, block: Array, baseline: Array) -> _Test:
    nothing = np.full(block.shape[:-1], np.nan)
    difference = nothing if min(n, n_baseline) == 0 else block.mean(-1) - baseline.mean(-1)
    return _Test(n, n_baseline, difference, nothing, nothing, nothing, nothing, nothing)


def holm(p: Array) -> Array:
    """Holm-adjusted p-values along the last axis (the blocks of a study); NaN is left out of the family."""
    tested = ~np.isnan(p)
    if p.ndim > 1:
        return np.apply_along_axis(holm, -1, p)
    adjusted = np.full_like(p, np.nan)
    if tested.any():
        adjusted[tested] = multipletests(p[tested], method="holm")[1]
    return adjusted


def compare(losses: Mapping[str, Array], baseline: str, analysis: str = "unpaired") -> dict[str, Comparison]:
    """Every other block of ``losses`` against ``baseline``.

    ``analysis`` is `unpaired` (Welch) or `paired` (t of per-seed differences); Holm runs over the blocks that have
    at least three seeds. Verdicts are `better`, `worse`, `not resolved` or `too few seeds`.
    """
    one = {"unpaired": _unpaired, "paired": _paired}[analysis]
    names = [name for name in losses if name != baseline]
    tests = [one(losses[name], losses[baseline]) for name in names]
    if not tests:
        return {}
    guarded = [np.where(t.se > 0, 2 * stats.t.sf(_ratio(t), t.df), t.p) for t in tests]
    # A flat comparison keeps its p of 1; the guard only ever raises a p.
    guarded = [np.fmax(g, t.p) for g, t in zip(guarded, tests, strict=True)]
    adjusted = holm(np.stack(guarded, axis=-1))
    family = sum(min(t.n, t.n_baseline) >= MIN_SEEDS for t in tests)
    alpha = (1 - LEVEL) / max(1, family)
    result = {}
    for i, (name, t) in enumerate(zip(names, tests, strict=True)):
        with np.errstate(invalid="ignore"):
            half = stats.t.isf(alpha / 2, t.df) * t.se
        result[name] = Comparison(
            n=t.n,
            n_baseline=t.n_baseline,
            difference=t.difference,
            se=t.se,
            df=t.df,
            p=t.p,
            p_guarded=guarded[i],
            p_adjusted=adjusted[..., i],
            low=t.low,
            high=t.high,
            wide_low=np.where(t.se > 0, t.difference - half, np.nan),
            wide_high=np.where(t.se > 0, t.difference + half, np.nan),
            verdict=verdicts(t.difference, adjusted[..., i]),
        )
    return result


def _ratio(test: _Test) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs(test.difference / test.se)


def verdicts(difference: Array, p_adjusted: Array) -> npt.NDArray[np.str_]:
    """`better`, `worse`, `not resolved`, or `too few seeds` where there is no p."""
    resolved = p_adjusted <= 1 - LEVEL
    return np.select(
        [np.isnan(p_adjusted), resolved & (difference < 0), resolved & (difference > 0)],
        [TOO_FEW, BETTER, WORSE],
        default=NOT_RESOLVED,
    )


def permutation_p(block: Array, baseline: Array) -> Resampled:
    """Two-sided permutation p of the difference in means; exact up to 200,000 arrangements. NaN without seeds."""
    block, baseline = present(block), present(baseline)
    n, n_baseline = len(block), len(baseline)
    arrangements = comb(n + n_baseline, n)
    floor = min(1.0, 2 / arrangements)
    if min(n, n_baseline) < 2:
        return Resampled(float("nan"), True, floor)
    exact = arrangements <= MAX_EXACT
    test = stats.permutation_test(
        (block, baseline),
        _mean_difference,
        vectorized=True,
        n_resamples=np.inf if exact else RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return Resampled(float(test.pvalue), exact, floor)


def sign_flip_p(differences: Array) -> Resampled:
    """Two-sided sign-flip p of per-seed differences; exact up to 200,000 arrangements. NaN without seeds."""
    differences = present(differences)
    n = len(differences)
    floor = min(1.0, 2 / 2**n)
    if n < 2:
        return Resampled(float("nan"), True, floor)
    exact = 2**n <= MAX_EXACT
    test = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if exact else RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return Resampled(float(test.pvalue), exact, floor)


def _mean_difference(x: Array, y: Array, axis: int = -1) -> Array:
    return np.asarray(np.mean(x, axis=axis) - np.mean(y, axis=axis))


def bca_interval(block: Array, baseline: Array | None = None) -> tuple[float, float] | None:
    """Bootstrap (BCa) 95% interval of a difference in means, or of the mean of per-seed differences.

    None below five seeds and where the losses do not vary: the bootstrap has nothing to say there.
    """
    samples = [present(block)] if baseline is None else [present(block), present(baseline)]
    if min(len(sample) for sample in samples) < MIN_SEEDS_BCA or all(np.ptp(s) == 0 for s in samples):
        return None
    statistic = np.mean if baseline is None else _mean_difference
    interval = stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        confidence_level=LEVEL,
        method="BCa",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None


def variance_ratio(block: Array, baseline: Array) -> float:
    """Variance of the difference if unpaired over that of the per-seed differences, on the seeds both have.

    Above 1 pairing made the comparison more precise, about 1 it bought nothing, below 1 it cost. NaN below three seeds.
    """
    both = ~(np.isnan(block) | np.isnan(baseline))
    x, y = np.asarray(block)[both], np.asarray(baseline)[both]
    if len(x) < MIN_SEEDS or np.ptp(x - y) == 0:
        return float("nan")
    return float((x.var(ddof=1) + y.var(ddof=1)) / (x - y).var(ddof=1))
