import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower

from ffnlab.study import statistics
from ffnlab.study.power import detectable_difference, seeds_needed, seeds_needed_paired


def example(seed: int = 0, n: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "gelu": 1.9 + 0.01 * rng.standard_normal(n),
        "relu": 1.91 + 0.03 * rng.standard_normal(n),
        "swiglu": 1.85 + 0.01 * rng.standard_normal(n + 2)[:n],
    }


def test_unpaired_is_scipys_welch():
    losses = example()
    for name, c in statistics.compare(losses, "gelu").items():
        direct = stats.ttest_ind(losses[name], losses["gelu"], equal_var=False)
        interval = direct.confidence_interval(0.95)
        assert c.p == pytest.approx(direct.pvalue, rel=1e-12)
        assert (c.low, c.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
        assert c.difference == pytest.approx(losses[name].mean() - losses["gelu"].mean())


def test_unpaired_by_hand():
    # means 2 and 4, variances 1 and 4, n 3: t = -2 / sqrt(5/3), Welch's df = (5/3)^2 / ((1/9 + 16/9) / 2) = 50/17
    c = statistics.compare({"b": np.array([2.0, 4.0, 6.0]), "x": np.array([1.0, 2.0, 3.0])}, "b")["x"]
    assert c.difference == pytest.approx(-2)
    assert c.se == pytest.approx(math.sqrt(5 / 3))
    assert c.p == pytest.approx(2 * stats.t.sf(2 / math.sqrt(5 / 3), 50 / 17))
    # guard at n 3: 2 + (50/17 - 2) / 4
    assert c.df == pytest.approx(2 + (50 / 17 - 2) / 4)


def test_paired_is_scipys_t_of_differences():
    losses = example()
    for name, c in statistics.compare(losses, "gelu", "paired").items():
        direct = stats.ttest_rel(losses[name], losses["gelu"])
        interval = direct.confidence_interval(0.95)
        assert c.p == pytest.approx(direct.pvalue, rel=1e-12)
        assert (c.low, c.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert c.p_guarded == pytest.approx(c.p)  # the paired test is exact: nothing to guard


def test_holm_is_statsmodels_and_right_by_hand():
    p = np.array([0.01, 0.04, 0.03])
    assert statistics.holm(p) == pytest.approx([0.03, 0.06, 0.06])
    losses = example(3)
    compared = statistics.compare(losses, "gelu")
    guarded = [float(c.p_guarded) for c in compared.values()]
    assert [float(c.p_adjusted) for c in compared.values()] == pytest.approx(multipletests(guarded, method="holm")[1])


def test_holm_leaves_out_what_was_not_tested():
    assert statistics.holm(np.array([0.02, np.nan, 0.03]))[[0, 2]] == pytest.approx([0.04, 0.04])
    assert np.isnan(statistics.holm(np.array([0.02, np.nan])))[1]


def test_stacked_studies_equal_single_ones():
    rng = np.random.default_rng(1)
    stack = rng.standard_normal((5, 4, 6))
    many = statistics.compare({str(i): stack[:, i] for i in range(4)}, "0")
    for s in range(5):
        one = statistics.compare({str(i): stack[s, i] for i in range(4)}, "0")
        for name, c in one.items():
            assert many[name].p_adjusted[s] == pytest.approx(float(c.p_adjusted))
            assert many[name].wide_low[s] == pytest.approx(float(c.wide_low))
            assert many[name].verdict[s] == str(c.verdict)


@pytest.mark.parametrize("analysis", ["unpaired", "paired"])
@pytest.mark.parametrize(("n", "n_baseline"), [(1, 1), (2, 2), (2, 6), (6, 2), (0, 3)])
def test_under_three_seeds_nothing_is_better_or_worse(analysis, n, n_baseline):
    full = np.full(6, np.nan)
    block, base = full.copy(), full.copy()
    block[:n] = np.linspace(0, 1e-6, n)
    base[:n_baseline] = 100 + np.linspace(0, 1e-6, n_baseline)
    c = statistics.compare({"b": base, "x": block}, "b", analysis)["x"]
    assert c.verdict == statistics.TOO_FEW
    assert all(math.isnan(v) for v in (c.p, c.low, c.high, c.wide_low, c.p_adjusted))


def test_absent_seeds():
    base = np.array([1.0, 2.0, 3.0, 4.5, np.nan])
    block = np.array([np.nan, 2.5, 3.1, 4.9, 9.0])
    unpaired = statistics.compare({"b": base, "x": block}, "b")["x"]
    assert (unpaired.n, unpaired.n_baseline) == (4, 4)
    assert unpaired.p == pytest.approx(stats.ttest_ind(block[1:], base[:4], equal_var=False).pvalue)
    paired = statistics.compare({"b": base, "x": block}, "b", "paired")["x"]
    assert paired.n == 3
    assert paired.p == pytest.approx(stats.ttest_1samp([0.5, 0.1, 0.4], 0).pvalue)


def test_losses_that_never_vary_resolve_nothing():
    c = statistics.compare({"b": np.full(6, 2.0), "x": np.full(6, 1.0)}, "b")["x"]
    assert c.verdict == statistics.NOT_RESOLVED
    assert c.p_adjusted == 1


def test_verdicts_name_the_side():
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal((4, 8))
    losses = {"base": 2 + noise[0], "low": 1 + noise[1], "high": 3 + noise[2], "same": 2 + noise[3]}
    got = {name: str(c.verdict) for name, c in statistics.compare(losses, "base").items()}
    assert got == {"low": "better", "high": "worse", "same": "not resolved"}


samples = st.lists(
    st.lists(st.floats(-3, 3, allow_nan=False), min_size=4, max_size=4, unique=True), min_size=2, max_size=4
)


@given(samples, st.sampled_from(["unpaired", "paired"]))
@settings(max_examples=60, deadline=None)
def test_intervals_and_verdicts_agree(rows, analysis):
    losses = {str(i): np.array(row) for i, row in enumerate(rows)}
    for c in statistics.compare(losses, "0", analysis).values():
        resolved = c.verdict in (statistics.BETTER, statistics.WORSE)
        tiny = 1e-9 * max(1.0, abs(float(c.difference)))
        if c.wide_low > tiny or c.wide_high < -tiny:
            assert resolved
        if c.low < -tiny and c.high > tiny:
            assert not resolved
        assert c.p_guarded >= c.p
        if not np.isnan(c.wide_low):
            assert c.wide_low <= c.low + tiny
            assert c.wide_high >= c.high - tiny


def test_guard_lies_between_the_safe_bound_and_welch():
    for n in (3, 4, 6, 10, 30, 1000):
        welch = 2.0 * (n - 1)
        assert n - 1 < statistics.guarded_df(welch, n, n) < welch
    assert statistics.guarded_df(1998.0, 1000, 1000) == pytest.approx(1998, rel=0.01)
    assert statistics.guarded_df(5.0, 6, 9) == 5  # Welch at its least is left alone


def test_permutation_by_hand_and_floor():
    # 3 against 3, fully apart: 2 of the 20 arrangements are as extreme
    r = statistics.permutation_p(np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.5]))
    assert (r.p, r.exact, r.floor) == (pytest.approx(0.1), True, pytest.approx(0.1))
    assert statistics.permutation_p(np.arange(4.0), np.arange(10.0, 14.0)).p == pytest.approx(2 / 70)


def test_permutation_is_scipys_exact_test():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal(6), rng.standard_normal(6) + 0.8
    direct = stats.permutation_test(
        (x, y), lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis), vectorized=True, n_resamples=np.inf
    )
    assert statistics.permutation_p(x, y).p == pytest.approx(direct.pvalue)


def test_large_permutations_are_sampled_and_say_so():
    rng = np.random.default_rng(5)
    assert not statistics.permutation_p(rng.standard_normal(15), rng.standard_normal(15)).exact


def test_sign_flips_by_hand_and_floor():
    assert statistics.sign_flip_p(np.array([1.0, 2.0, 3.0])).p == pytest.approx(2 / 8)
    five, six = statistics.sign_flip_p(np.arange(1.0, 6)), statistics.sign_flip_p(np.arange(1.0, 7))
    assert five.p == five.floor == pytest.approx(2 / 32)
    assert six.p == six.floor == pytest.approx(2 / 64)
    # |sum| of +-1 +-2 +-4 is never equal twice: -1+2+4 = 5 is exceeded or met by 7 and 5 on both sides: 4 of 8
    assert statistics.sign_flip_p(np.array([-1.0, 2.0, 4.0])).p == pytest.approx(4 / 8)


def test_bca_is_scipys_and_starts_at_five_seeds():
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal(6), rng.standard_normal(6)
    direct = stats.bootstrap(
        (x, y), lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis), method="BCa", n_resamples=9999,
        vectorized=True, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert statistics.bca_interval(x, y) == pytest.approx((direct.low, direct.high))
    assert statistics.bca_interval(x[:4], y) is None
    assert statistics.bca_interval(x[:4]) is None
    assert statistics.bca_interval(np.ones(6), np.ones(6)) is None
    low, high = statistics.bca_interval(x)
    assert low < x.mean() < high


def test_what_pairing_buys():
    rng = np.random.default_rng(7)
    common, a, b = rng.standard_normal((3, 4000))
    ratio = statistics.variance_ratio(3 * common + a, 3 * common + b)
    assert ratio == pytest.approx(10, rel=0.1)  # (10 + 10) / 2
    assert statistics.variance_ratio(a, b) == pytest.approx(1, rel=0.1)
    assert math.isnan(statistics.variance_ratio(a[:2], b[:2]))


@pytest.mark.parametrize("n", [3, 4, 6, 10])
def test_detectable_difference_is_statsmodels_for_equal_variances(n):
    direct = TTestIndPower().solve_power(effect_size=None, nobs1=n, alpha=0.05, power=0.8)
    assert detectable_difference(math.sqrt(2 / n), 2 * n - 2) == pytest.approx(direct, rel=1e-4)


def test_seeds_needed_paired_is_statsmodels():
    for effect in (0.3, 0.5, 1.0, 2.0):
        direct = TTestPower().solve_power(effect_size=effect, nobs=None, alpha=0.05, power=0.8)
        assert seeds_needed_paired(effect, 1.0) == math.ceil(float(np.squeeze(direct)))


def test_seeds_needed_for_many_seeds_is_statsmodels():
    direct = TTestIndPower().solve_power(effect_size=0.3, nobs1=None, alpha=0.05, power=0.8)
    assert seeds_needed(0.3, 1.0, 1.0) == pytest.approx(float(direct), abs=1.5)
    assert seeds_needed(0.3, 1.0, 1.0, blocks=7) > seeds_needed(0.3, 1.0, 1.0)


def test_seeds_needed_has_ends():
    assert seeds_needed(100.0, 1.0, 1.0) == 3
    assert seeds_needed(1e-6, 1.0, 1.0) is None
    assert seeds_needed(0.0, 1.0, 1.0) is None
    assert seeds_needed(1.0, 0.0, 0.0) is None
    assert math.isnan(detectable_difference(0.0, 5))


@pytest.mark.parametrize("blocks", [1, 7])
def test_the_detectable_difference_is_found_in_about_80_percent_of_studies(blocks):
    n, studies = 6, 4000
    rng = np.random.default_rng(8)
    true = detectable_difference(math.sqrt(2 / n), float(statistics.guarded_df(2.0 * n - 2, n, n)), blocks)
    block, base = rng.standard_normal((studies, n)) - true, rng.standard_normal((studies, n))
    c = statistics.compare({"b": base, "x": block}, "b")["x"]
    power = np.mean(c.p_guarded <= 0.05 / blocks)
    assert 0.76 < power < 0.90  # the guard makes it err to the side of more power
