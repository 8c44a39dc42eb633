"""Gradient death: neurons whose incoming weights no longer receive a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.census.layers import Layer


def gradient_norms(
    layers: Sequence[Layer], batches: Sequence[Any], loss: Callable[[Any], Tensor]
) -> list[Tensor | None]:
    """Per layer, the norm of each neuron's incoming-weight gradient, averaged over the batches: `(d_ff,)`.

    All weights that lead into a neuron count together (`gate` and `up`). None for a layer whose incoming
    weights cannot be told apart per neuron, as in a fused projection. The parameters' `.grad` is not touched.
    """
    weights = [layer.incoming() for layer in layers]
    flat = [weight for group in weights for weight in group]
    if not flat or not batches:
        return [None] * len(layers)
    sums: list[Tensor | None] = [None] * len(layers)
    for batch in batches:
        with torch.enable_grad():
            gradients = iter(torch.autograd.grad(loss(batch), flat, allow_unused=True))
        for index, (layer, group) in enumerate(zip(layers, weights, strict=True)):
            if not group:
                continue
            total = torch.zeros(layer.d_ff, dtype=torch.float64)
            for weight in group:
                gradient = next(gradients)
                if gradient is not None:
                    neurons = _neuron_dim(layer.ffn, weight)
                    total += gradient.double().square().sum(1 - neurons).cpu()
            before = sums[index]
            sums[index] = total.sqrt() if before is None else before + total.sqrt()
    return [None if total is None else total / len(batches) for total in sums]


def _neuron_dim(ffn: nn.Module, weight: Tensor) -> int:
    """Which dimension of an incoming weight is `d_ff`: 0 in nn.Linear, 1 in Conv1D."""
    return next(
        int(not isinstance(module, nn.Linear)) for module in ffn.modules() if getattr(module, "weight", None) is weight
    )
