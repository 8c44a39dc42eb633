"""What must hold between our own blocks and activations."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ffnlab.ffn import DenseFFN, GatedFFN, make_activation

D, F = 12, 20
X = torch.linspace(-6, 6, 241, dtype=torch.float64)


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(block: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return block


@pytest.mark.parametrize("activation", ["sigmoid", "gelu", "silu"])
def test_a_gated_block_with_a_constant_gate_is_linear(activation: str) -> None:
    block = fill(GatedFFN(D, F, activation, bias=True))
    with torch.no_grad():
        block.gate.weight.zero_()  # the gate is act(bias), whatever x
        block.up.bias.zero_()
        block.down.bias.zero_()
        x, y = tokens(0), tokens(1)
        torch.testing.assert_close(block(x + y), block(x) + block(y), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(block(-2 * x), -2 * block(x), rtol=1e-12, atol=1e-12)
        expected = (block.up(x) * make_activation(activation)(block.gate.bias)) @ block.down.weight.T
        torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)


def test_glu_with_an_open_gate_is_half_the_linear_block() -> None:
    block = fill(GatedFFN(D, F, "sigmoid"))
    with torch.no_grad():
        block.gate.weight.zero_()
        torch.testing.assert_close(block(tokens()), 0.5 * block.down(block.up(tokens())), rtol=1e-12, atol=1e-12)


def test_swish_with_beta_1_is_silu() -> None:
    torch.testing.assert_close(make_activation("swish", beta=1.0)(X), functional.silu(X), rtol=1e-14, atol=1e-14)


def test_swish_with_beta_0_is_half_the_input() -> None:
    assert torch.equal(make_activation("swish", beta=0.0)(X), X / 2)


def test_swish_with_large_beta_is_relu() -> None:
    beta = 1e4
    off = (make_activation("swish", beta=beta)(X) - functional.relu(X)).abs().max()
    assert off <= 0.2785 / beta  # |swish - relu| is at most max x sigmoid(-x) = 0.2784645... over beta


def test_learned_beta_starts_as_the_fixed_one() -> None:
    for beta in (0.0, 0.5, 1.0, 3.0):
        fixed, learned = make_activation("swish", beta=beta), make_activation("swish", beta=beta, learn_beta=True)
        assert torch.equal(fixed(X), learned(X))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", functional.gelu),
        ("relu", functional.relu),
        ("silu", functional.silu),
        ("sigmoid", torch.sigmoid),
        ("identity", lambda x: x),
    ],
)
def test_the_glu_family_is_one_class(activation: str, function) -> None:
    """GEGLU is GatedFFN(gelu), and so on (Shazeer 2020, eqs. 5 and 6)."""
    block = fill(GatedFFN(D, F, activation, bias=True))
    x = tokens()
    gate, up, down = (dict(getattr(block, name).named_parameters()) for name in ("gate", "up", "down"))
    hidden = function(x @ gate["weight"].T + gate["bias"]) * (x @ up["weight"].T + up["bias"])
    torch.testing.assert_close(block(x), hidden @ down["weight"].T + down["bias"], rtol=1e-12, atol=1e-12)


def test_relu2_is_the_square_of_relu() -> None:
    assert torch.equal(make_activation("relu2")(X), functional.relu(X) ** 2)
    dense, squared = fill(DenseFFN(D, F, "relu")), fill(DenseFFN(D, F, "relu2"))
    x = tokens()
    torch.testing.assert_close(squared(x), squared.down(functional.relu(dense.up(x)) ** 2), rtol=1e-12, atol=1e-12)


def test_reglu_with_equal_gate_and_up_is_relu2() -> None:
    gated, dense = fill(GatedFFN(D, F, "relu")), fill(DenseFFN(D, F, "relu2"))
    with torch.no_grad():
        for projection in (gated.gate, gated.up):
            projection.weight.copy_(dense.up.weight)
        gated.down.weight.copy_(dense.down.weight)
    torch.testing.assert_close(gated(tokens()), dense(tokens()), rtol=1e-12, atol=1e-12)
