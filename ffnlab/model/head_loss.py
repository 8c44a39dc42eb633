"""The head and its cross-entropy: in place, all logits at once, or a piece at a time.

Shape suffixes: B batch, T positions, M = B T, D d_model, V vocab_size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100  # a target that counts in no loss and no census: padding, and the given half of the copy task

# Logits that are held at once at most (256 MB in float32). Below it, all at once is faster.
LARGEST = 2**26

# From this many on (2 MB in float32, more than a core's own cache) a second and a third buffer cost more than the few
# small operations that do without them.
LARGE = 2**19


def head_loss(x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of ``head(x_BTD)`` against ``targets_BT``; targets of -100 do not count.

    On the CPU ``LARGE`` logits and more become their own probabilities and then their own gradient, in one buffer,
    where ``F.cross_entropy`` fills three. Above ``LARGEST`` PyTorch's ``linear_cross_entropy`` (from 2.13 on) goes
    through the tokens in pieces, and holds the logits of one piece: less memory, no more speed. Loss and gradients are
    equal on all ways. On these two ``head`` is read, not called: hooks on it see generation, not training.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    n_logits = targets_BT.numel() * head.out_features
    plain = n_logits >= min(LARGE, LARGEST) and _is_plain(x_BTD, head)
    if plain and n_logits > LARGEST and hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(
            x_BTD.flatten(0, 1),
            head.weight,
            targets_BT.flatten(),
            reduction=reduction,
            ignore_index=IGNORE,
            options=nn.LinearCrossEntropyOptions(),
        )
    if plain and x_BTD.device.type == "cpu":
        loss: Tensor = _InPlace.apply(x_BTD.flatten(0, 1), head.weight, targets_BT.flatten(), reduction)
        return loss
    logits_MV = head(x_BTD).flatten(0, 1)
    if logits_MV.dtype in (torch.bfloat16, torch.float16):
        logits_MV = logits_MV.float()  # a sum over thousands of tokens has steps of 64 in bfloat16
    return F.cross_entropy(logits_MV, targets_BT.flatten(), ignore_index=IGNORE, reduction=reduction)


def _is_plain(x_BTD: Tensor, head: nn.Linear) -> bool:
    """Whether the ways that do without ``head``'s own forward pass would do the same as it."""
    return (
        head.bias is None
        and type(head.weight.data) is Tensor  # a sharded weight is of another kind
        and x_BTD.dtype == head.weight.dtype
        and x_BTD.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled(x_BTD.device.type)
        and not torch.compiler.is_compiling()
    )


class _InPlace(torch.autograd.Function):
    """Cross-entropy of ``x W^T``, whose gradient for the logits is ``softmax - onehot`` over the number of targets."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, reduction: str) -> Tensor:
        """The loss; the one buffer of size ``(M, V)`` ends as probabilities."""
        counts_M = targets_M != IGNORE
        index_M1 = targets_M.masked_fill(~counts_M, 0)[:, None]
        probs_MV = F.linear(x_MD, weight_VD)
        target_logits_M = probs_MV.gather(1, index_M1)[:, 0]
        largest_M = probs_MV.amax(1)
        torch.softmax(probs_MV, 1, out=probs_MV)
        # The largest probability is at least 1/V, so its logarithm gives the normaliser without a loss of precision.
        losses_M = (largest_M - target_logits_M) - probs_MV.amax(1).log()
        total = torch.where(counts_M, losses_M, 0).sum()
        scale = 1 / counts_M.sum().to(total.dtype) if reduction == "mean" else torch.ones_like(total)
        ctx.save_for_backward(x_MD, weight_VD, probs_MV, index_M1, counts_M, scale)
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gradients of ``x`` and of the weight; the factors that all tokens share come in after the products."""
        x_MD, weight_VD, probs_MV, index_M1, counts_M, scale = ctx.saved_tensors
        probs_MV.scatter_add_(1, index_M1, probs_MV.new_full(index_M1.shape, -1.0))
        if not bool(counts_M.all()):
            probs_MV[~counts_M] = 0
        factor = torch.where(scale.isfinite(), grad * scale, 0)  # no target counts: a mean over none moves nothing
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        return (
            (probs_MV @ weight_VD).mul_(factor) if needs_x else None,
            (probs_MV.t() @ x_MD).mul_(factor) if needs_weight else None,
            None,
            None,
        )
