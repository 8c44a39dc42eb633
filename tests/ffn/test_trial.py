"""What a block of one's own may get wrong, said in a line before a run begins."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ffnlab.census import census
from ffnlab.config import compose
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN, blamed_on, try_block
from ffnlab.training import prepare_run


class Own(DenseFFN):
    """A dense block whose output can be spoiled."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)


class Nothing(Own):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


class Pair(Own):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        return super().forward(x), 0.0


class Narrow(Own):
    """Broadcasting would add it to the residual stream, and it would train."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :1]


class Swapped(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(-1, -2)


class Whole(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).long()


class Twice(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class ByItsWeight(Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) @ self.down.weight.t()


class WrongInEval(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class Raising(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ x)


class NotBuilt(Own):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        raise KeyError("width")


class ByName(Own):
    """Right, if unusual: its modules are called by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=self.act(input=self.up(input=x)))


@pytest.mark.parametrize("block", [DenseFFN, GatedFFN, ByName])
def test_a_block_that_keeps_the_contract_passes_and_draws_nothing(block: type[nn.Module]) -> None:
    before = torch.get_rng_state()
    try_block(lambda d_model, d_ff: block(d_model, d_ff), 16, 32)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Nothing, r"Nothing is given \(1, 2, 16\) in train mode and returns nothing"),
        (Pair, "returns a tuple, not one tensor"),
        (Narrow, r"returns \(1, 2, 1\) of torch.float32"),
        (Swapped, r"returns \(1, 16, 2\)"),
        (Whole, "of torch.int64, not floats"),
        (Twice, "calls its down 2 times"),
        (ByItsWeight, "calls its down 0 times"),
        (WrongInEval, "in eval mode and calls its down 0 times"),
    ],
)
def test_a_block_that_breaks_it_is_told(block: type[nn.Module], said: str) -> None:
    with pytest.raises(UserError, match=said):
        try_block(block, 16, 32)


@pytest.mark.parametrize(("block", "said"), [(Raising, "RuntimeError: .*"), (NotBuilt, "KeyError: 'width'")])
def test_an_error_of_its_own_is_said_with_its_place(block: type[nn.Module], said: str) -> None:
    target = f"{__name__}.{block.__name__}"
    with (
        pytest.raises(UserError, match=rf"{block.__name__} fails in test_trial.py, line \d+: {said}"),
        blamed_on(target),
    ):
        try_block(block, 16, 32)


def test_a_run_with_it_is_not_begun() -> None:
    cfg = compose(
        ["data=copy", "model.d_model=24", "model.n_layers=1", "model.n_heads=2", "budget=none", "budget.d_ff=32"]
    )
    cfg.ffn.target, cfg.ffn.options = f"{__name__}.Narrow", {}
    with pytest.raises(UserError, match=r"Narrow is given \(1, 2, 24\)"):
        prepare_run(cfg)


def test_the_census_sees_modules_that_are_called_by_name() -> None:
    x = torch.randn(2, 5, 16)
    named, placed = ByName(16, 32), DenseFFN(16, 32)
    named.load_state_dict(placed.state_dict())
    tables = [census(block, [x], down=["down"]).table for block in (named, placed)]
    for column, values in tables[0].items():
        np.testing.assert_array_equal(values, tables[1][column], err_msg=column)
