"""Causal self-attention. Shape suffixes: B batch, T positions, D d_model, N heads, H head width."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.model.config import ModelConfig


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

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_heads = cfg.n_heads
        self.dropout = cfg.dropout_attention
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.out = nn.Linear(cfg.d_model, cfg.d_model, bias=cfg.bias)
        self.rope = Rope(cfg.d_model // cfg.n_heads, cfg.context_length) if cfg.positions == "rope" else None

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
        mixed_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BNTH, v_BNTH, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed_BNTH.transpose(1, 2).reshape(B, T, D))
