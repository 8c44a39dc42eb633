"""Our blocks against those of transformers and x-transformers, weight for weight."""

from typing import Any

import pytest
import torch
from peers import Tensors, both_precisions, compare_blocks, renamed
from torch import nn
from transformers import GemmaConfig, GPT2Config, LlamaConfig, T5Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense
from x_transformers.x_transformers import FeedForward

from ffnlab.ffn import DenseFFN, GatedFFN

D, F = 12, 20


# LLaMA's names, and Gemma's
llama_names = renamed(gate="gate_proj", up="up_proj", down="down_proj")


@both_precisions
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_gated_is_llama_mlp(dtype: torch.dtype, bias: bool, activation: str) -> None:
    config = LlamaConfig(
        hidden_size=D, num_attention_heads=3, intermediate_size=F, hidden_act=activation, mlp_bias=bias
    )
    ours = GatedFFN(D, F, activation, bias=bias).to(dtype)
    compare_blocks(ours, LlamaMLP(config).to(dtype), llama_names, D)


@both_precisions
@pytest.mark.parametrize(("ours", "theirs"), [("gelu_tanh", "gelu_new"), ("silu", "silu"), ("relu", "relu")])
def test_gated_is_t5_gated_dense(dtype: torch.dtype, ours: str, theirs: str) -> None:
    config = T5Config(d_model=D, d_ff=F, dropout_rate=0.0)
    config.dense_act_fn = theirs
    names = renamed(gate="wi_0", up="wi_1", down="wo")
    compare_blocks(GatedFFN(D, F, ours).to(dtype), T5DenseGatedActDense(config).to(dtype), names, D)


@both_precisions
def test_gated_is_gemma_mlp(dtype: torch.dtype) -> None:
    config = GemmaConfig(hidden_size=D, intermediate_size=F, hidden_act="gelu_pytorch_tanh")
    compare_blocks(GatedFFN(D, F, "gelu_tanh").to(dtype), GemmaMLP(config).to(dtype), llama_names, D)


def conv1d(tensors: Tensors) -> Tensors:
    """GPT-2's Conv1D keeps its weight as (in, out)."""
    turned = {name: t.T if t.ndim == 2 else t for name, t in tensors.items()}
    return renamed(up="c_fc", down="c_proj")(turned)


@both_precisions
@pytest.mark.parametrize(("ours", "theirs"), [("gelu_tanh", "gelu_new"), ("gelu", "gelu"), ("relu", "relu")])
def test_dense_is_gpt2_mlp(dtype: torch.dtype, ours: str, theirs: str) -> None:
    config = GPT2Config(n_embd=D, resid_pdrop=0.0, activation_function=theirs)
    compare_blocks(DenseFFN(D, F, ours, bias=True).to(dtype), GPT2MLP(F, config).to(dtype), conv1d, D)


@both_precisions
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_dense_is_t5_dense(dtype: torch.dtype, activation: str) -> None:
    config = T5Config(d_model=D, d_ff=F, dropout_rate=0.0)
    config.dense_act_fn = activation
    names = renamed(up="wi", down="wo")
    compare_blocks(DenseFFN(D, F, activation).to(dtype), T5DenseActDense(config).to(dtype), names, D)


@both_precisions
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("gelu", {}),
        ("silu", {"swish": True}),
        ("swish", {"swish": True}),
        ("relu2", {"relu_squared": True}),
        ("relu", {"custom_activation": nn.ReLU()}),
        ("leaky_relu", {"custom_activation": nn.LeakyReLU()}),
        ("gelu_tanh", {"custom_activation": nn.GELU(approximate="tanh")}),
    ],
)
def test_dense_is_x_transformers(dtype: torch.dtype, bias: bool, activation: str, options: dict[str, Any]) -> None:
    theirs = FeedForward(D, mult=F / D, no_bias=not bias, **options)
    names = renamed(**{"up": "ff.0.0", "down": "ff.2"})
    compare_blocks(DenseFFN(D, F, activation, bias=bias).to(dtype), theirs.to(dtype), names, D)


def fused(tensors: Tensors) -> Tensors:
    """x-transformers' GLU has one projection: the first half of its rows is up, the second the gate."""
    return {
        "ff.0.proj.weight": torch.cat((tensors["up.weight"], tensors["gate.weight"])),
        "ff.0.proj.bias": torch.cat((tensors["up.bias"], tensors["gate.bias"])),
        "ff.2.weight": tensors["down.weight"],
        "ff.2.bias": tensors["down.bias"],
    }


@both_precisions
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("gelu", {}),
        ("silu", {"swish": True}),
        ("relu", {"custom_activation": nn.ReLU()}),
        ("sigmoid", {"custom_activation": nn.Sigmoid()}),
        ("identity", {"custom_activation": nn.Identity()}),
    ],
)
def test_gated_is_x_transformers_glu(dtype: torch.dtype, activation: str, options: dict[str, Any]) -> None:
    theirs = FeedForward(D, mult=F / D, glu=True, **options)
    compare_blocks(GatedFFN(D, F, activation, bias=True).to(dtype), theirs.to(dtype), fused, D)


def test_x_transformers_glu_keeps_a_bias_when_told_not_to() -> None:
    """Why the comparison above is made with biases; ours obeys."""
    theirs = dict(FeedForward(D, mult=F / D, glu=True, no_bias=True).named_parameters())
    assert "ff.0.proj.bias" in theirs
    assert not [name for name, _ in GatedFFN(D, F, "gelu", bias=False).named_parameters() if "bias" in name]


def test_the_comparison_sees_swapped_projections() -> None:
    config = LlamaConfig(hidden_size=D, num_attention_heads=3, intermediate_size=F)
    swapped = renamed(gate="up_proj", up="gate_proj", down="down_proj")
    with pytest.raises(AssertionError, match="not close"):
        compare_blocks(GatedFFN(D, F, "silu").double(), LlamaMLP(config).double(), swapped, D)
