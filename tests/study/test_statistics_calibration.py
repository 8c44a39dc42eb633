"""Does a study without a true difference stay silent, does the interval cover a known one? 1,000 simulations each.

The judges are `statistics.compare` and nothing else: the code that judges real studies.
"""

import math

import numpy as np
import pytest
from scipy import stats

from ffnlab.study import statistics

pytestmark = pytest.mark.slow

STUDIES, BLOCKS = 1000, 8
SEEDS = range(3, 11)
# The baseline first. `pilot`: the spread that a pilot study measured (.011 to .023). The others are harder than that.
SPREADS = {
    "equal": [1.0] * 8,
    "pilot": [1, 2, 1.2, 1.8, 1.5, 1.1, 1.7, 1.9],
    "quiet baseline": [1] + [4] * 7,
    "very quiet baseline": [1] + [8] * 7,
    "loud baseline": [4] + [1] * 7,
}


def draw(rng, shape, tails):
    if tails == "normal":
        return rng.standard_normal(shape)
    if tails == "t3":
        return rng.standard_t(3, shape)
    # one seed in ten is five times as far out
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.1, 5, 1)


def simulate(n, spread, correlation, tails, seed, studies=STUDIES):
    """Losses (studies, blocks, n) without any true difference; equal seeds correlate across blocks."""
    rng = np.random.default_rng([seed, n])
    common, own = draw(rng, (studies, 1, n), tails), draw(rng, (studies, BLOCKS, n), tails)
    noise = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own
    return noise * np.asarray(spread, float)[:, None]


def losses_of(stack):
    return {str(i): stack[:, i] for i in range(stack.shape[1])}


def share_with_a_verdict(stack, analysis):
    """Share of studies in which any block is called better or worse."""
    compared = statistics.compare(losses_of(stack), "0", analysis)
    verdicts = np.stack([c.verdict for c in compared.values()], axis=-1)
    return np.isin(verdicts, [statistics.BETTER, statistics.WORSE]).any(-1).mean()


def highest(count, tests):
    """Share that sampling error alone exceeds once in a thousand runs of ``tests`` such checks, at a true 5%."""
    return stats.binom.isf(0.001 / tests, count, 0.05) / count


@pytest.mark.parametrize("analysis", ["unpaired", "paired"])
@pytest.mark.parametrize("tails", ["normal", "t3", "outliers"])
@pytest.mark.parametrize("correlation", [0, 0.5, 0.9])
@pytest.mark.parametrize("spread", list(SPREADS))
def test_no_difference_no_verdict(spread, correlation, tails, analysis):
    shares = [share_with_a_verdict(simulate(n, SPREADS[spread], correlation, tails, 11), analysis) for n in SEEDS]
    assert max(shares) <= highest(STUDIES, 90 * len(SEEDS)), dict(zip(SEEDS, shares, strict=True))
    assert np.mean(shares) <= highest(STUDIES * len(SEEDS), 90)


def test_plain_welch_with_holm_would_not_pass():
    """Why the verdict does not use Welch's own degrees of freedom."""
    stack = simulate(3, SPREADS["very quiet baseline"], 0, "normal", 12, studies=4_000)
    compared = statistics.compare(losses_of(stack), "0")
    plain = np.stack([c.p for c in compared.values()], axis=-1).min(-1) * len(compared) <= 0.05
    assert plain.mean() > 0.07
    assert share_with_a_verdict(stack, "unpaired") <= highest(4_000, 1)


def test_the_guard_costs_little_power_where_seeds_are_not_few():
    rng = np.random.default_rng(13)
    n, gap = 8, 2.6
    stack = rng.standard_normal((4000, BLOCKS, n))
    stack[:, 1] -= gap
    compared = statistics.compare(losses_of(stack), "0")["1"]
    plain = np.mean(compared.p <= 0.05 / 7)
    guarded = np.mean(compared.p_guarded <= 0.05 / 7)
    assert plain - guarded < 0.06


@pytest.mark.parametrize("tails", ["normal", "t3"])
@pytest.mark.parametrize("spread", ["equal", "pilot", "quiet baseline"])
@pytest.mark.parametrize(("analysis", "correlation"), [("unpaired", 0), ("paired", 0), ("paired", 0.9)])
def test_intervals_cover_a_known_difference(analysis, correlation, spread, tails):
    covered = []
    for n in (3, 4, 6, 10):
        stack = simulate(n, SPREADS[spread], correlation, tails, 14)
        true = np.linspace(-3, 3, BLOCKS)
        compared = statistics.compare(losses_of(stack + true[:, None]), "0", analysis)
        inside = [
            ((c.low <= true[i] - true[0]) & (true[i] - true[0] <= c.high)).mean()
            for i, c in enumerate(compared.values(), 1)
        ]
        covered.append(np.mean(inside))
    # The blocks of a study share their baseline, so their coverage is not independent: 0.7 points for 1,000 studies.
    assert min(covered) > 0.925
    assert 0.94 < np.mean(covered) < 0.99 if tails == "t3" else 0.94 < np.mean(covered) < 0.975


def test_simultaneous_intervals_cover_all_blocks_at_once():
    for n in (3, 5, 8):
        compared = statistics.compare(losses_of(simulate(n, SPREADS["pilot"], 0, "normal", 15)), "0")
        inside = np.stack([(c.wide_low <= 0) & (c.wide_high >= 0) for c in compared.values()], axis=-1)
        assert inside.all(-1).mean() > 0.95 - 0.02


def test_true_differences_are_found():
    rng = np.random.default_rng(16)
    stack = rng.standard_normal((500, BLOCKS, 6))
    stack[:, 1] -= 6
    stack[:, 2] += 6
    compared = statistics.compare(losses_of(stack), "0")
    assert np.mean(compared["1"].verdict == statistics.BETTER) > 0.95
    assert np.mean(compared["2"].verdict == statistics.WORSE) > 0.95
    assert np.mean(compared["1"].verdict == statistics.WORSE) == 0
