"""AdamW's parameter groups and the learning-rate schedule."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ffnlab.config import OptimConfig


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, vectors and scalars (norms, biases, betas) do not; every parameter is in exactly one group.

    Tensors that are spread over processes stand apart, because the fused optimiser takes no mixture.
    """
    groups = []
    for decays in (True, False):
        for spread in (False, True):
            chosen = [
                p
                for p in network.parameters()
                if p.requires_grad and (p.ndim >= 2) is decays and isinstance(p, DTensor) is spread
            ]
            if chosen or not spread:
                groups.append({"params": chosen, "weight_decay": weight_decay if decays else 0.0})
    return groups


def make_optimizer(network: nn.Module, cfg: OptimConfig) -> AdamW:
    """AdamW in its fused form: one pass over the parameters instead of one per tensor and operation."""
    groups = [group for group in parameter_groups(network, cfg.weight_decay) if group["params"]]
    device = next(network.parameters()).device.type
    fused = device in ("cpu", "cuda")
    return AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused)


def lr_factor(step: int, n_steps: int, cfg: OptimConfig) -> float:
    """The share of ``cfg.lr`` used by optimiser step ``step`` (the first is 0) of ``n_steps``."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return 1.0
    # The last step, n_steps - 1, is the one that reaches the final rate.
    progress = min(1.0, (step - cfg.warmup) / max(1, n_steps - 1 - cfg.warmup))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1 - progress
    return cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * fall


def make_schedule(optimizer: torch.optim.Optimizer, n_steps: int, cfg: OptimConfig) -> LambdaLR:
    """The schedule as Lightning wants it, advanced once per optimiser step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, n_steps, cfg))
