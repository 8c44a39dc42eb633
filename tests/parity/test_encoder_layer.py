"""Our Transformer block, both norm placements, against ``torch.nn.TransformerEncoderLayer`` with a causal mask."""

import pytest
import torch
from peers import Tensors, both_precisions, compare_blocks
from torch import Tensor, nn

from ffnlab.ffn import DenseFFN
from ffnlab.model import Block, ModelConfig

D, F, N = 24, 40, 4


def to_encoder_layer(tensors: Tensors) -> Tensors:
    names = {
        "attention.qkv.weight": "self_attn.in_proj_weight",
        "attention.qkv.bias": "self_attn.in_proj_bias",
        "attention.out.weight": "self_attn.out_proj.weight",
        "attention.out.bias": "self_attn.out_proj.bias",
        "attention_norm.weight": "norm1.weight",
        "attention_norm.bias": "norm1.bias",
        "ffn_norm.weight": "norm2.weight",
        "ffn_norm.bias": "norm2.bias",
        "ffn.up.weight": "linear1.weight",
        "ffn.up.bias": "linear1.bias",
        "ffn.down.weight": "linear2.weight",
        "ffn.down.bias": "linear2.bias",
    }
    return {names[name]: tensor for name, tensor in tensors.items()}


def pair(placement: str, activation: str, norm_first: bool) -> tuple[Block, nn.TransformerEncoderLayer]:
    cfg = ModelConfig(d_model=D, n_heads=N, context_length=16, bias=True, norm_placement=placement)
    ours = Block(cfg, DenseFFN(D, F, activation, bias=True))
    theirs = nn.TransformerEncoderLayer(
        D, N, dim_feedforward=F, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    )
    return ours, theirs


@both_precisions
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(("placement", "norm_first"), [("post", False), ("pre", True)])
def test_block_is_encoder_layer(dtype: torch.dtype, activation: str, placement: str, norm_first: bool) -> None:
    ours, theirs = pair(placement, activation, norm_first)
    theirs.to(dtype)

    def causal(x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=dtype)
        return theirs(x, src_mask=mask, is_causal=True)

    compare_blocks(ours.to(dtype), theirs, to_encoder_layer, D, run_theirs=causal)


@pytest.mark.parametrize(("placement", "norm_first"), [("post", True), ("pre", False)])
def test_the_other_placement_differs(placement: str, norm_first: bool) -> None:
    ours, theirs = pair(placement, "gelu", norm_first)
    theirs.double()
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        compare_blocks(ours.double(), theirs, to_encoder_layer, D, run_theirs=lambda x: theirs(x, src_mask=mask))


def test_without_the_mask_it_differs() -> None:
    ours, theirs = pair("pre", "gelu", True)
    with pytest.raises(AssertionError, match="not close"):
        compare_blocks(ours.double(), theirs.double(), to_encoder_layer, D)
