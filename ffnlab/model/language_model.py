"""A decoder-only Transformer language model with a pluggable FFN.

Shape suffixes: B batch, T positions, D d_model, V vocab_size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ffnlab.model.attention import CausalSelfAttention
from ffnlab.model.config import ModelConfig
from ffnlab.model.head_loss import head_loss


def make_norm(cfg: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) over ``d_model``."""
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps, bias=cfg.bias)


class Block(nn.Module):
    """Attention, then the FFN, each beside the residual stream.

    ::

        pre:   x ──┬─ norm ─ attention ─ + ──┬─ norm ─ ffn ─ + ──>
                   └─────────────────────┘   └───────────────┘
        post:  x ──┬─ attention ─ + ─ norm ──┬─ ffn ─ + ─ norm ──>
                   └──────────────┘          └────────┘
    """

    def __init__(self, cfg: ModelConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.pre = cfg.norm_placement == "pre"
        self.attention_norm = make_norm(cfg)
        self.attention = CausalSelfAttention(cfg)
        self.ffn_norm = make_norm(cfg)
        self.ffn = ffn

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``(B, T, d_model)`` to ``(B, T, d_model)``."""
        if self.pre:
            x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
            return x_BTD + self.ffn(self.ffn_norm(x_BTD))
        x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD))
        return self.ffn_norm(x_BTD + self.ffn(x_BTD))


class LanguageModel(nn.Module):
    """Embeddings, blocks, head.

    Args:
        cfg: sizes and choices.
        vocab_size: number of tokens.
        make_ffn: called once a layer for a fresh FFN that maps ``(..., d_model)`` to ``(..., d_model)``.

    Raises:
        UserError: sizes that cannot make a network.
    """

    def __init__(self, cfg: ModelConfig, vocab_size: int, make_ffn: Callable[[], nn.Module]) -> None:
        super().__init__()
        cfg.check()
        self.n_layers = cfg.n_layers
        self.context_length = cfg.context_length
        self.vocab_size = vocab_size
        self.checkpoint_blocks = False  # recompute activations in the backward pass: less memory, a third more work
        self.token_embedding = nn.Embedding(vocab_size, cfg.d_model)
        self.position_embedding = nn.Embedding(cfg.context_length, cfg.d_model) if cfg.positions == "learned" else None
        self.drop_embedding = nn.Dropout(cfg.dropout_embedding)
        self.blocks = nn.ModuleList(Block(cfg, make_ffn()) for _ in range(cfg.n_layers))
        self.final_norm = make_norm(cfg) if cfg.norm_placement == "pre" else nn.Identity()
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        if cfg.tied_head:
            self.head.weight = self.token_embedding.weight

    def features(self, tokens_BT: Tensor) -> Tensor:
        """The vectors that enter the head, ``(B, T, d_model)``."""
        x_BTD = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding.weight[: tokens_BT.shape[1]]
        x_BTD = self.drop_embedding(x_BTD)
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        return self.final_norm(x_BTD)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Next-token logits ``(B, T, vocab_size)`` for tokens ``(B, T)``, T at most ``context_length``.

        With ``targets_BT`` (for each position the token that follows, or -100) the cross-entropy in nats instead: over
        the targets that count, their mean per token or their ``sum``. Both go through ``forward``, so that hooks see
        training as well and ``torch.compile`` compiles the loss with the network.
        """
        x_BTD = self.features(tokens_BT)
        return self.head(x_BTD) if targets_BT is None else head_loss(x_BTD, self.head, targets_BT, reduction)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats; see ``forward``."""
        return self(tokens_BT, targets_BT, reduction)

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        n_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue ``tokens_BT`` by ``n_tokens``; beyond ``context_length`` the oldest tokens drop out of sight.

        Args:
            tokens_BT: prompts of equal length, at least one token.
            n_tokens: how many to add.
            temperature: divides the logits; 0 is greedy.
            top_k: sample among the k likeliest only.
            generator: source of randomness.

        Returns:
            ``(B, T + n_tokens)``, the prompts included.
        """
        for _ in range(n_tokens):
            logits_BV = self(tokens_BT[:, -self.context_length :])[:, -1].float()
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits_BV.topk(min(top_k, self.vocab_size)).values[:, -1:]
                    logits_BV = logits_BV.masked_fill(logits_BV < kth, float("-inf"))
                next_B1 = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
        return tokens_BT
