"""The pure accumulator against the definitions, written out over the whole hidden matrix at once."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ffnlab.census import NeuronAccumulator


def count(hidden: Tensor, pre: Tensor | None = None, split: list[int] | None = None) -> NeuronAccumulator:
    accumulator = NeuronAccumulator(hidden.shape[1], len(hidden))
    sizes = split or [len(hidden)]
    pres = pre.split(sizes) if pre is not None else [None] * len(sizes)
    for rows, pre_rows in zip(hidden.split(sizes), pres, strict=True):
        accumulator.update(rows, pre_rows)
    return accumulator


def hidden_like(kind: str, tokens: int = 1000, d_ff: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 0, d_ff)
    pre = torch.randn(tokens, d_ff, generator=generator) * scale - 0.4 * scale
    hidden = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "identity": lambda x: x}[kind](pre)
    return hidden, pre


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity"])
def test_figures_are_the_definitions(kind: str) -> None:
    hidden, pre = hidden_like(kind)
    hidden[:, 3] = 0
    pre[:, 5] = -pre[:, 5].abs()
    norm = torch.linspace(0, 2, hidden.shape[1], dtype=torch.float64)
    accumulator = count(hidden, pre)
    figures = accumulator.result(norm, exact_zero=True)

    x = hidden.double().abs()
    rms = x.square().mean().sqrt()
    peak = x.amax(0)
    contrib = x * norm
    assert figures["dead/exact"] == (peak == 0).double().mean()
    assert figures["dead/rel"] == (peak <= 1e-3 * rms).double().mean()
    assert figures["gate/never_open"] == (pre.amax(0) <= 0).double().mean()
    expected = (contrib.amax(0) <= 1e-3 * contrib.square().mean().sqrt()).double().mean()
    assert figures["dead/contrib"] == expected
    assert figures["dormant/rate"] == (x.mean(0) <= 0.025 * x.mean()).double().mean()
    assert figures["sparsity/zero"] == pytest.approx((x == 0).double().mean())
    threshold = float(accumulator.columns()["below_threshold"][0])
    assert threshold == pytest.approx(1e-3 * float(rms), rel=0.016)
    assert figures["sparsity/rel"] == pytest.approx(float((x < threshold).double().mean()), abs=1e-12)
    for name, tokens in (("n16", 63), ("n4", 250)):
        part = x[:tokens]
        dead = part.amax(0) <= 1e-3 * part.square().mean().sqrt()
        assert figures[f"dead/rel_{name}"] == dead.double().mean()


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 999), max_size=12, unique=True), kind=st.sampled_from(["relu", "gelu"]))
def test_the_split_into_batches_does_not_matter(cuts: list[int], kind: str) -> None:
    hidden, pre = hidden_like(kind)
    edges = [0, *sorted(cuts), 1000]
    split = [end - start for start, end in itertools.pairwise(edges)]
    assert count(hidden, pre, split).result(exact_zero=True) == count(hidden, pre).result(exact_zero=True)


def test_merging_parts_in_any_order_is_counting_the_whole() -> None:
    hidden, pre = hidden_like("gelu")
    whole = count(hidden, pre).columns()
    parts = []
    for start, end in ((600, 1000), (0, 100), (100, 600)):
        part = NeuronAccumulator(hidden.shape[1], 1000)
        part.update(hidden[start:end], pre[start:end], start=start)
        parts.append(part)
    merged = NeuronAccumulator(hidden.shape[1], 1000)
    for part in parts:
        merged.merge(part)
    for name, column in merged.columns().items():
        exact = column.dtype.kind in "ib" or name.startswith("max")
        assert torch.allclose(
            torch.tensor(column).double(),
            torch.tensor(whole[name]).double(),
            rtol=0 if exact else 1e-12,
            equal_nan=True,
        ), name


@pytest.mark.parametrize("factor", [10.0, 1e-4, 3.7e5])
def test_scaling_hidden_changes_no_relative_figure(factor: float) -> None:
    hidden, _ = hidden_like("gelu")
    plain, scaled = count(hidden).result(), count(hidden * factor).result()
    # the sparsity threshold is rounded to a grid, so that a scale may move it by up to 1.6%
    assert scaled.pop("sparsity/rel") == pytest.approx(plain.pop("sparsity/rel"), rel=0.04)
    assert scaled == plain
    assert 0 < plain["dead/rel"] < 1


def test_one_firing_in_65536_tokens_is_life() -> None:
    accumulator = NeuronAccumulator(8, 65536)
    for start in range(0, 65536, 4096):
        hidden = torch.ones(4096, 8)
        hidden[:, :2] = 0
        if start == 40960:
            hidden[1234, 0] = 0.5
        accumulator.update(hidden)
    figures = accumulator.result(exact_zero=True)
    assert figures["dead/exact"] == figures["dead/rel"] == 1 / 8
    assert figures["dead/rel_n4"] == 2 / 8
    assert figures["dormant/rate"] == 2 / 8  # its mean is small: dormant is not dead


def test_sparsity_with_batches_of_very_different_size() -> None:
    """Entries that grow along the way move the histogram's window; nothing counted may be lost."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 16, generator=generator) * torch.logspace(-1.5, 0, 512)[:, None]
    accumulator = count(hidden, split=[64] * 8)
    threshold = accumulator.columns()["below_threshold"][0]
    expected = float((hidden.abs() < threshold).double().mean())
    assert accumulator.result()["sparsity/rel"] == pytest.approx(expected)
    assert expected > 0.002


def test_sparsity_is_missing_rather_than_wrong() -> None:
    """256 vectors fix the range of thresholds that can be resolved; here the final one is far outside."""
    hidden = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    accumulator = count(torch.cat([hidden * 1e-6, hidden]), split=[256, 256])
    assert "sparsity/rel" not in accumulator.result()
    assert "sparsity/zero" in accumulator.result()


def test_all_silent() -> None:
    figures = count(torch.zeros(100, 4)).result(torch.ones(4), exact_zero=True)
    assert figures["dead/exact"] == figures["dead/rel"] == figures["dead/contrib"] == 1
    assert figures["sparsity/zero"] == figures["sparsity/rel"] == 1


def test_what_is_not_defined_is_absent() -> None:
    hidden, _ = hidden_like("gelu")
    figures = count(hidden).result(column_norm=torch.zeros(24), gradient=torch.zeros(24))
    assert not {"dead/exact", "dead/contrib", "dead/gradient", "gate/never_open"} & figures.keys()
    assert NeuronAccumulator(4).result() == {}


def test_tokens_beyond_n_do_not_count() -> None:
    accumulator = NeuronAccumulator(2, 10)
    for _ in range(3):
        accumulator.update(torch.ones(4, 2))
    assert accumulator.n == 10
    accumulator.update(torch.full((4, 2), 9.0))
    assert accumulator.n == 10
    assert accumulator.columns()["max_abs"].tolist() == [1, 1]


def test_memory_does_not_grow_with_n() -> None:
    def size(n: int) -> int:
        accumulator = NeuronAccumulator(16, n)
        for _ in range(n // 256):
            accumulator.update(torch.randn(256, 16))
        return sum(value.numel() for value in vars(accumulator).values() if isinstance(value, Tensor))

    assert size(65536) == size(512)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (torch.ones(3, 5), "5 features"),
        (torch.full((3, 4), math.nan), "not finite"),
        (torch.full((3, 4), math.inf), "not finite"),
    ],
)
def test_bad_vectors_are_refused(hidden: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeuronAccumulator(4).update(hidden)
