"""Finding the layers, and asking a block whether its hidden can be exactly zero."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.census.layers import block_down, describe, find_layers, has_exact_zero
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN


class NoAct(nn.Module):
    """A user's block that calls a function instead of a module."""

    def __init__(self, function: str, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8)
        self.function = getattr(F, function)
        nn.init.normal_(self.inner.weight, std=scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.inner(x)))


class Model(nn.Module):
    def __init__(self, make_block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"ffn": make_block()}) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["ffn"](x)
        return x


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (lambda: DenseFFN(8, 32, "relu"), True),
        (lambda: DenseFFN(8, 32, "relu2"), True),
        (lambda: GatedFFN(8, 32, "relu"), True),
        (lambda: DenseFFN(8, 32, "leaky_relu"), False),
        (lambda: DenseFFN(8, 32, "gelu"), False),
        (lambda: DenseFFN(8, 32, "gelu_tanh"), False),
        (lambda: DenseFFN(8, 32, "silu"), False),
        (lambda: DenseFFN(8, 32, "swish", learn_beta=True), False),
        (lambda: DenseFFN(8, 32, "tanh"), False),
        (lambda: GatedFFN(8, 32, "sigmoid"), False),
        (lambda: GatedFFN(8, 32, "identity"), False),
        (lambda: GatedFFN(8, 32, "gelu"), False),
        (lambda: NoAct("relu"), True),
        (lambda: NoAct("gelu"), False),
        (lambda: NoAct("silu", scale=3.0), False),
    ],
)
def test_blocks_are_told_apart(block, expected: bool) -> None:
    ffn = block()
    assert has_exact_zero(describe("ffn.down", ffn.down, ffn)) is expected


def test_a_dead_relu_layer_is_still_a_relu_layer() -> None:
    ffn = DenseFFN(8, 32, "relu", bias=True)
    nn.init.constant_(ffn.up.bias, -1e6)
    assert has_exact_zero(describe("ffn.down", ffn.down, ffn))


def test_an_activation_that_cannot_be_asked_is_not_reported_as_exact() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(4, 4)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.down(x + memory)

    ffn = Odd()
    assert not has_exact_zero(describe("down", ffn.down, ffn))


def test_layers_are_found_by_the_end_of_their_name_in_the_order_of_the_model() -> None:
    layers = find_layers(Model(lambda: GatedFFN(8, 16)), ["ffn.down"])
    assert [layer.name for layer in layers] == [f"blocks.{index}.ffn.down" for index in range(12)]
    assert find_layers(Model(lambda: GatedFFN(8, 16)), ["blocks.1*.ffn.down"])[-1].name == "blocks.11.ffn.down"
    assert {layer.d_ff for layer in layers} == {16}


def test_a_pattern_without_a_match_lists_the_candidates_once() -> None:
    with pytest.raises(UserError, match=r"'mlp\.fc2' matches no module") as error:
        find_layers(Model(lambda: GatedFFN(8, 16)), ["mlp.fc2"])
    assert str(error.value).endswith("Candidates: blocks.*.ffn.down, blocks.*.ffn.gate, blocks.*.ffn.up.")


def test_a_module_that_is_no_projection_is_refused() -> None:
    with pytest.raises(UserError, match=r"'blocks\.0\.ffn\.act' is a SiLU"):
        find_layers(Model(lambda: GatedFFN(8, 16)), ["blocks.*.ffn.act"])


def test_a_block_without_down_is_told_the_contract() -> None:
    with pytest.raises(UserError, match=r"Linear has no `down`.*self\.down = nn\.Linear\(d_ff, d_model\)"):
        block_down(nn.Linear(4, 4))


def test_column_norms_of_both_weight_layouts() -> None:
    from transformers.pytorch_utils import Conv1D

    linear, conv = nn.Linear(6, 4), Conv1D(4, 6)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.T)
    ours, theirs = (describe("down", module, nn.Module()) for module in (linear, conv))
    assert ours.d_ff == theirs.d_ff == 6
    assert torch.equal(ours.column_norm(), theirs.column_norm())
    assert torch.allclose(ours.column_norm()[2], linear.weight[:, 2].double().norm())
