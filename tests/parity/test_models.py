"""The whole language model against GPT-2 and LLaMA of transformers: logits, gradients, one optimiser step."""

import pytest
import torch
from peers import Tensors, both_precisions, close, compare_all, give_weights, gradients
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ffnlab.config import OptimConfig
from ffnlab.ffn import DenseFFN, GatedFFN
from ffnlab.model import LanguageModel, ModelConfig
from ffnlab.training.optim import make_optimizer

D, F, L, N, T, V = 24, 40, 3, 4, 11, 37  # d_model, d_ff, layers, heads, positions, tokens
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-6)


def gpt2() -> tuple[LanguageModel, nn.Module]:
    config = GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=D,
        n_layer=L,
        n_head=N,
        n_inner=F,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    cfg = ModelConfig(d_model=D, n_layers=L, n_heads=N, context_length=16, bias=True)
    return LanguageModel(cfg, V, lambda: DenseFFN(D, F, "gelu_tanh", bias=True)), GPT2LMHeadModel(config)


def to_gpt2(tensors: Tensors) -> Tensors:
    parts = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    }
    mapped = {
        "transformer.wte.weight": tensors["token_embedding.weight"],
        "transformer.wpe.weight": tensors["position_embedding.weight"],
        "transformer.ln_f.weight": tensors["final_norm.weight"],
        "transformer.ln_f.bias": tensors["final_norm.bias"],
    }
    for i in range(L):
        for ours, theirs in parts.items():
            weight = tensors[f"blocks.{i}.{ours}.weight"]  # a matrix is a Conv1D there: (in, out)
            mapped[f"transformer.h.{i}.{theirs}.weight"] = weight.T if weight.ndim == 2 else weight
            mapped[f"transformer.h.{i}.{theirs}.bias"] = tensors[f"blocks.{i}.{ours}.bias"]
    return mapped


def llama(tied: bool) -> tuple[LanguageModel, nn.Module]:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=N,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    cfg = ModelConfig(
        d_model=D,
        n_layers=L,
        n_heads=N,
        context_length=16,
        norm="rmsnorm",
        norm_eps=1e-6,
        positions="rope",
        tied_head=tied,
    )
    return LanguageModel(cfg, V, lambda: GatedFFN(D, F, "silu")), LlamaForCausalLM(config)


def to_llama(tensors: Tensors) -> Tensors:
    parts = {
        "attention_norm": "input_layernorm",
        "attention.out": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    }
    mapped = {
        "model.embed_tokens.weight": tensors["token_embedding.weight"],
        "model.norm.weight": tensors["final_norm.weight"],
    }
    if "head.weight" in tensors:
        mapped["lm_head.weight"] = tensors["head.weight"]
    for i in range(L):
        for ours, theirs in parts.items():
            mapped[f"model.layers.{i}.{theirs}.weight"] = tensors[f"blocks.{i}.{ours}.weight"]
        for name, rows in zip("qkv", tensors[f"blocks.{i}.attention.qkv.weight"].chunk(3), strict=True):
            mapped[f"model.layers.{i}.self_attn.{name}_proj.weight"] = rows
    return mapped


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(V, (3, T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def peer_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Decay on matrices only, as everywhere in this project."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)


def compare_models(ours: LanguageModel, theirs: nn.Module, to_peer, tolerance: float) -> None:
    give_weights(ours, theirs, to_peer, std=0.15)
    inputs, targets = batch()
    theirs.train()
    logits = theirs(inputs).logits
    close(ours(inputs), logits, tolerance)
    loss = ours.loss(inputs, targets)
    peer_loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(loss, peer_loss, tolerance)
    loss.backward()
    peer_loss.backward()
    compare_all(to_peer(gradients(ours)), gradients(theirs), 10 * tolerance)
    before = ours.token_embedding.weight.detach().clone()
    make_optimizer(ours, OPTIM).step()
    peer_optimizer(theirs).step()
    assert (ours.token_embedding.weight - before).abs().max() > OPTIM.lr / 2
    with torch.no_grad():
        compare_all(to_peer(dict(ours.named_parameters())), dict(theirs.named_parameters()), 10 * tolerance)
        close(ours(inputs), theirs(inputs).logits, 10 * tolerance)


@both_precisions
def test_pre_ln_model_is_gpt2(dtype: torch.dtype) -> None:
    ours, theirs = gpt2()
    compare_models(ours.to(dtype), theirs.to(dtype), to_gpt2, 1e-11 if dtype == torch.float64 else 2e-5)


@both_precisions
@pytest.mark.parametrize("tied", [False, True])
def test_rmsnorm_rope_swiglu_model_is_llama(dtype: torch.dtype, tied: bool) -> None:
    """LLaMA's RMSNorm computes in float32 whatever it is given, so float64 gains little here."""
    ours, theirs = llama(tied)
    compare_models(ours.to(dtype), theirs.to(dtype), to_llama, 3e-6 if dtype == torch.float64 else 2e-5)
