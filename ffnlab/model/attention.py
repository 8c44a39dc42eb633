"""Causal self-attention. Shape suffixes: B batch, T positions, D d_model, N heads, H head width."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.model.config import ModelConfig

# Positions up to which PyTorch's fused attention is slower than whole matrices on a CPU with more than one thread: it
# makes a product of its own for each 32 queries of each head, and two threads hardly speed it up.
SHORT = 128


def _fused_is_slower(x_BTD: Tensor) -> bool:
    return (
        x_BTD.shape[1] <= SHORT
        and x_BTD.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch.get_num_threads() > 1
        and not torch.is_autocast_enabled("cpu")
    )


def attend_whole(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, bias_TT: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(H) + bias) v`` (Vaswani et al. 2017, eq. 1) by products over all heads at once.

    Holds ``B N T^2`` weights for the backward pass, which fused attention does not.
    """
    B, N, T, H = q_BNTH.shape
    q, k, v = (x_BNTH.reshape(B * N, T, H) for x_BNTH in (q_BNTH, k_BNTH, v_BNTH))
    weights = torch.baddbmm(bias_TT, q, k.transpose(1, 2), alpha=H**-0.5).softmax(-1)
    return torch.bmm(weights, v).view(B, N, T, H)


class Rope(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, eq. 34), pairing i with i + H/2 as LLaMA does."""

    cos_TH: Tensor
    sin_TH: Tensor

    def __init__(self, head_width: int, context_length: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos_TH", angles.cos(), persistent=False)
        self.register_buffer("sin_TH", angles.sin(), persistent=False)

    def forward(self, x_BNTH: Tensor) -> Tensor:
        """Rotate queries or keys by their position."""
        length = x_BNTH.shape[-2]
        cos, sin = self.cos_TH[:length].to(x_BNTH.dtype), self.sin_TH[:length].to(x_BNTH.dtype)
        low, high = x_BNTH.chunk(2, dim=-1)
        return x_BNTH * cos + torch.cat((-high, low), dim=-1) * sin


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what is before it.

    Query, key and value projections are packed in ``qkv`` (rows: all queries, all keys, all values).
    """

    future_TT: Tensor  # -inf where a position would see a later one

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_heads = cfg.n_heads
        self.dropout = cfg.dropout_attention
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.out = nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.bias)
        self.rope = Rope(cfg.d_model // cfg.n_heads, cfg.context_length) if cfg.positions == "rope" else None
        short = min(cfg.context_length, SHORT)
        future_TT = torch.full((short, short), float("-inf")).triu(1)
        self.register_buffer("future_TT", future_TT, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``(B, T, d_model)`` to ``(B, T, d_model)``."""
        B, T, D = x_BTD.shape
        # split: its gradient is one copy, where that of a packed permutation is several
        q_BNTH, k_BNTH, v_BNTH = (
            part_BTD.view(B, T, self.n_heads, D // self.n_heads).transpose(1, 2)
            for part_BTD in self.qkv(x_BTD).split(D, dim=-1)
        )
        if self.rope is not None:
            q_BNTH, k_BNTH = self.rope(q_BNTH), self.rope(k_BNTH)
        dropout = self.dropout if self.training else 0.0
        if not dropout and _fused_is_slower(x_BTD):
            mixed_BNTH = attend_whole(q_BNTH, k_BNTH, v_BNTH, self.future_TT[:T, :T])
        else:
            mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, dropout_p=dropout, is_causal=True)
        return self.out(mixed_BNTH.transpose(1, 2).reshape(B, T, D))
