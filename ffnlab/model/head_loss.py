"""The head and its cross-entropy, with all logits at once or a piece at a time.

Shape suffixes: B batch, T positions, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100  # a target that counts in no loss and no census: padding, and the given half of the copy task

# Logits that are held at once at most. Training holds them some three times over (logits, log-probabilities, gradient):
# here 0.8 GB in float32. Below it, all at once is faster.
LARGEST = 2**26


def head_loss(x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of ``head(x_BTD)`` against ``targets_BT``; targets of -100 do not count.

    Above ``LARGEST`` logits PyTorch's ``linear_cross_entropy`` (from 2.13 on) goes through the tokens in pieces, and
    holds the logits of one piece: equal loss and gradients, less memory, no more speed.
    """
    if targets_BT.numel() * head.out_features > LARGEST and _can_chunk(x_BTD, head):
        return F.linear_cross_entropy(
            x_BTD.flatten(0, 1),
            head.weight,
            targets_BT.flatten(),
            reduction=reduction,
            ignore_index=IGNORE,
            options=nn.LinearCrossEntropyOptions(),
        )
    logits_BTV = head(x_BTD)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction=reduction)


def _can_chunk(x_BTD: Tensor, head: nn.Linear) -> bool:
    """Whether PyTorch has the chunked path, and would do the same on it: it ignores autocast and does not compile."""
    return (
        hasattr(F, "linear_cross_entropy")
        and head.bias is None
        and type(head.weight.data) is Tensor  # a sharded weight is of another kind
        and not torch.is_autocast_enabled(x_BTD.device.type)
        and not torch.compiler.is_compiling()
    )
