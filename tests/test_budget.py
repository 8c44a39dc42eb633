"""Equal budgets: known answers, and properties that hold at any width."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ffnlab.budget import count_flops, count_params, solve
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN

dense, gated = partial(DenseFFN), partial(GatedFFN)


@pytest.mark.parametrize(("factory", "d_ff"), [(dense, 48), (gated, 32)])
def test_d_model_12(factory: partial[nn.Module], d_ff: int) -> None:
    budget = solve(factory, 12)
    assert (budget.d_ff, budget.params, budget.mismatch, budget.matched) == (d_ff, 1152, 0.0, True)


@pytest.mark.parametrize(("d_model", "d_ff"), [(96, 256), (192, 512), (384, 1024), (768, 2048)])
def test_eight_thirds_is_exact_where_it_divides(d_model: int, d_ff: int) -> None:
    budget = solve(gated, d_model)
    assert (budget.d_ff, budget.mismatch) == (d_ff, 0.0)


def test_llama_width_by_rounding_to_256() -> None:
    budget = solve(gated, 4096, multiple_of=256)
    assert (budget.d_ff, budget.params) == (11008, 135_266_304)
    assert budget.mismatch == pytest.approx(135_266_304 / 134_217_728 - 1)


@given(
    d_model=st.integers(2, 64).map(lambda n: 8 * n),
    bias=st.booleans(),
    factory=st.sampled_from([DenseFFN, GatedFFN]),
    kind=st.sampled_from(["params", "flops"]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_accepted_is_within_tolerance_and_nearest(
    d_model: int, bias: bool, factory: type[nn.Module], kind: str
) -> None:
    build = partial(factory, bias=bias)
    count = count_params if kind == "params" else count_flops
    target = count(dense, d_model, 4 * d_model)
    try:
        budget = solve(build, d_model, kind, tolerance=0.01)
    except UserError as error:
        assert "cannot be met" in str(error)
        return
    assert budget.d_ff % 8 == 0
    off = abs(count(build, d_model, budget.d_ff) - target)
    assert off <= 0.01 * target
    for other in (budget.d_ff - 8, budget.d_ff + 8):
        if other > 0:
            assert abs(count(build, d_model, other) - target) >= off


def test_counts_are_those_of_a_real_block_betas_included() -> None:
    build = partial(DenseFFN, activation="swish", learn_beta=True, bias=True)
    budget = solve(build, 96)
    assert budget.params == sum(p.numel() for p in build(96, budget.d_ff).parameters())
    assert budget.flops == 2 * 2 * 96 * budget.d_ff


def test_a_budget_that_cannot_be_met_names_what_can() -> None:
    with pytest.raises(UserError) as caught:
        solve(gated, 128, multiple_of=256)
    message = str(caught.value)
    assert "-25.0%" in message
    assert "budget.multiple_of=8 (d_ff=344)" in message
    assert "model.d_model=96 (d_ff=256)" in message
    assert solve(gated, 128, multiple_of=8).d_ff == 344  # the advice is true
    assert solve(gated, 96, multiple_of=256).d_ff == 256


def test_no_budget_is_labelled_unmatched() -> None:
    budget = solve(gated, 96, "none", d_ff=384)
    assert not budget.matched
    assert budget.mismatch == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"add budget.d_ff=N"):
        solve(gated, 96, "none")
    with pytest.raises(UserError, match=r"budget=none budget.d_ff=384"):
        solve(gated, 96, "params", d_ff=384)


class NoDown(nn.Module):
    """Breaks the contract."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.out = nn.Linear(d_ff, d_model)


class IgnoresWidth(nn.Module):
    """Takes d_ff and does not use it."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.down = nn.Linear(32, d_model)


def test_blocks_that_break_the_contract_are_refused_with_its_words() -> None:
    with pytest.raises(UserError, match="has no 'down'"):
        solve(NoDown, 16)
    with pytest.raises(UserError, match=r"down is nn.Linear\(32, 16\), but was asked for d_ff=64"):
        solve(IgnoresWidth, 16)


def test_sizing_draws_no_random_number() -> None:
    state = torch.random.get_rng_state()
    solve(gated, 96)
    assert torch.equal(state, torch.random.get_rng_state())


class Groups(DenseFFN):
    """As blocks with several experts do, it takes multiples of its number alone."""

    def __init__(self, d_model: int, d_ff: int, number: int) -> None:
        if d_ff % number:
            raise ValueError(f"d_ff must be divisible by {number}, not {d_ff}")
        super().__init__(d_model, d_ff)


@pytest.mark.parametrize("number", [3, 12, 48, 96])
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_block_is_sized_at_multiples_that_it_can_have(number: int, kind: str) -> None:
    assert solve(partial(Groups, number=number), 96, kind, multiple_of=number).d_ff == 384


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_down_without_a_weight_of_its_own_is_refused(norm) -> None:
    def factory(d_model: int, d_ff: int) -> nn.Module:
        block = DenseFFN(d_model, d_ff)
        block.down = norm(block.down)
        return block

    with pytest.raises(UserError, match=r"DenseFFN\.down has no weight of its own"):
        solve(factory, 96)
