"""The blocks against answers that were known before them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ffnlab.ffn import ACTIVATIONS, DenseFFN, GatedFFN, Swish, make_activation


def test_silu_gate_known_answer_and_gradients() -> None:
    # A gate of [0, 1] and an up of [3, 2] through W_down = [1, -1]: -silu(1) * 2.
    ffn = GatedFFN(2, 2, "silu").double()
    gate, up = torch.tensor([0.0, 1.0]).double(), torch.tensor([3.0, 2.0]).double()
    x = torch.tensor([1.0, 0.0]).double()
    with torch.no_grad():
        ffn.gate.weight.copy_(torch.stack((gate, torch.zeros(2)), dim=1))
        ffn.up.weight.copy_(torch.stack((up, torch.zeros(2)), dim=1))
        ffn.down.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    output = ffn(x)[0]
    assert output.item() == pytest.approx(-1.4621171572600098, abs=1e-15)
    output.backward()
    # x is the first unit vector, so the gradients of the pre-activations are those of the first column.
    assert ffn.gate.weight.grad[0, 0].item() == pytest.approx(1.5, abs=1e-15)
    assert ffn.up.weight.grad[0, 0].item() == 0.0


def test_glu_with_biases_is_the_published_formula() -> None:
    torch.manual_seed(0)
    ffn = GatedFFN(6, 10, "sigmoid", bias=True)
    x = torch.randn(4, 6)
    value = F.linear(x, ffn.up.weight, ffn.up.bias) * torch.sigmoid(F.linear(x, ffn.gate.weight, ffn.gate.bias))
    assert torch.equal(ffn(x), F.linear(value, ffn.down.weight, ffn.down.bias))


def test_swish_minimum_and_limits() -> None:
    x = torch.linspace(-4, 0, 400_001, dtype=torch.float64)
    y = Swish(1.0)(x)
    assert y.min().item() == pytest.approx(-0.278, abs=1e-3)
    assert x[y.argmin()].item() == pytest.approx(-1.278, abs=1e-3)
    z = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert torch.allclose(Swish(0.0)(z), z / 2, atol=0)
    assert torch.allclose(Swish(1e4)(z), z.relu(), atol=1e-12)
    assert torch.allclose(Swish(1.0)(z), F.silu(z), atol=1e-15)


def test_a_learned_beta_is_one_parameter_and_a_fixed_one_is_none() -> None:
    assert [n for n, _ in DenseFFN(4, 8, "swish", learn_beta=True).named_parameters()] == [
        "up.weight",
        "act.beta",
        "down.weight",
    ]
    assert list(DenseFFN(4, 8, "swish", beta=2.0).state_dict()) == ["up.weight", "down.weight"]


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_layout(bias: bool) -> None:
    kinds = ("weight", "bias") if bias else ("weight",)
    assert set(DenseFFN(4, 8, bias=bias).state_dict()) == {f"{p}.{k}" for p in ("up", "down") for k in kinds}
    assert set(GatedFFN(4, 8, bias=bias).state_dict()) == {f"{p}.{k}" for p in ("gate", "up", "down") for k in kinds}


def test_published_parameter_counts() -> None:
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    with torch.device("meta"):
        assert count(DenseFFN(12, 48)) == count(GatedFFN(12, 32)) == 1152
        assert count(DenseFFN(4096, 16384)) == 134_217_728
        assert count(GatedFFN(4096, 11008)) == 135_266_304
        assert count(DenseFFN(768, 3072)) == 4_718_592  # "about 4.7M"


@pytest.mark.parametrize(("hidden", "output"), [(0.5, 0.0), (0.0, 0.5), (0.5, 0.5), (0.0, 0.0)])
def test_dropout_sits_where_it_is_configured(hidden: float, output: float) -> None:
    torch.manual_seed(0)
    ffn = DenseFFN(64, 256, "identity", dropout_hidden=hidden, dropout_output=output)
    seen: list[torch.Tensor] = []
    ffn.down.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    y = ffn(torch.randn(50, 64))
    assert (seen[0] == 0).float().mean().item() == pytest.approx(hidden, abs=0.02)
    assert (y == 0).float().mean().item() == pytest.approx(output, abs=0.05)


@pytest.mark.parametrize("block", [DenseFFN, GatedFFN])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"d_model": 0, "d_ff": 4}, "d_model must be a positive"),
        ({"d_model": 4, "d_ff": -1}, "d_ff must be a positive"),
        ({"d_model": 4, "d_ff": 4.0}, "d_ff must be a positive"),
        ({"d_model": 4, "d_ff": 4, "dropout_hidden": 1.0}, r"dropout_hidden must lie in \[0, 1\)"),
        ({"d_model": 4, "d_ff": 4, "dropout_output": -0.1}, r"dropout_output must lie in \[0, 1\)"),
        ({"d_model": 4, "d_ff": 4, "activation": "rleu"}, "unknown activation 'rleu'"),
        ({"d_model": 4, "d_ff": 4, "activation": "relu", "beta": 2.0}, "beta and learn_beta belong to"),
    ],
)
def test_impossible_blocks_are_refused(block: type[nn.Module], arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        block(**arguments)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_shape_and_dtype(name: str) -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    y = make_activation(name)(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
