"""Schedule and parameter groups, at points worked out by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffnlab.config import OptimConfig, TrainConfig
from ffnlab.ffn import DenseFFN
from ffnlab.model import ModelConfig, build
from ffnlab.training.optim import lr_factor, make_optimizer, parameter_groups


def test_warm_up_climbs_in_equal_steps_to_the_full_rate() -> None:
    cfg = OptimConfig(warmup=4, schedule="constant")
    assert [lr_factor(step, 10, cfg) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_and_linear_end_at_the_last_step() -> None:
    for schedule, middle in (("cosine", 0.55), ("linear", 0.55)):
        cfg = OptimConfig(warmup=0, schedule=schedule, final_lr_ratio=0.1)
        assert lr_factor(0, 101, cfg) == 1.0
        assert lr_factor(50, 101, cfg) == pytest.approx(middle)
        assert lr_factor(100, 101, cfg) == pytest.approx(0.1)
    quarter = lr_factor(25, 101, OptimConfig(warmup=0, schedule="cosine", final_lr_ratio=0.0))
    assert quarter == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@given(
    n_steps=st.integers(1, 500),
    warmup=st.integers(0, 600),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    ratio=st.floats(0, 1),
)
def test_the_rate_is_never_negative_above_full_or_rising_after_warm_up(
    n_steps: int, warmup: int, schedule: str, ratio: float
) -> None:
    cfg = OptimConfig(warmup=warmup, schedule=schedule, final_lr_ratio=ratio)
    factors = [lr_factor(step, n_steps, cfg) for step in range(n_steps)]
    assert all(0 <= f <= 1 + 1e-12 for f in factors)
    tail = factors[warmup:]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(tail))


def test_only_matrices_decay_and_every_parameter_is_in_one_group() -> None:
    cfg = ModelConfig(d_model=16, n_layers=1, n_heads=2, context_length=4, bias=True)
    network = build(cfg, 20, lambda d, f: DenseFFN(d, f, "swish", bias=True, learn_beta=True), 32, 0)
    decay, rest = parameter_groups(network, 0.1)
    assert decay["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0.0
    names = {id(p): n for n, p in network.named_parameters()}
    decays = {names[id(p)] for p in decay["params"]}
    keeps = {names[id(p)] for p in rest["params"]}
    assert decays | keeps == set(names.values())
    assert not decays & keeps
    assert all(name.endswith(".weight") and "norm" not in name for name in decays)
    assert "blocks.0.ffn.act.beta" in keeps
    assert make_optimizer(network, OptimConfig()).defaults["fused"]


def test_long_runs_are_validated_twenty_times_and_short_ones_every_250_steps() -> None:
    assert [TrainConfig().validation_interval(n) for n in (100, 1500, 5000, 15_000)] == [250, 250, 250, 750]
    assert TrainConfig(val_every=7).validation_interval(15_000) == 7
