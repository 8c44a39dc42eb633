"""Pointwise nonlinearities by the field's names.

Each is an ``nn.Module`` rather than a bare function, so that its input (the pre-activation) can be observed
with a forward hook.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Swish(nn.Module):
    """``x * sigmoid(beta * x)`` (Ramachandran et al. 2017, arXiv 1710.05941).

    beta 1 is SiLU, beta 0 is ``x / 2``, beta to infinity is ReLU. With ``learn_beta`` the single scalar is a
    parameter, shared by all neurons of the layer.
    """

    beta: Tensor | float

    def __init__(self, beta: float = 1.0, learn_beta: bool = False) -> None:
        super().__init__()
        # A fixed beta is configuration, not state. As a plain number it survives a build on the meta device, which a
        # tensor outside the state dict does not: nothing could fill it again.
        self.beta = nn.Parameter(torch.tensor(float(beta))) if learn_beta else float(beta)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every element; the shape is kept."""
        beta = self.beta.to(x.dtype) if isinstance(self.beta, Tensor) else self.beta
        return x * torch.sigmoid(beta * x)

    def extra_repr(self) -> str:
        """Show beta's kind in ``print(model)``."""
        return f"learn_beta={isinstance(self.beta, nn.Parameter)}"


class SquaredReLU(nn.Module):
    """``relu(x) ** 2`` (Primer, So et al. 2021, arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every element; the shape is kept."""
        return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,  # negative slope 0.01
    "gelu": nn.GELU,  # x * Phi(x), with erf (Hendrycks and Gimpel 2016, arXiv 1606.08415)
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "swish": Swish,
    "relu2": SquaredReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}


def make_activation(name: str, beta: float = 1.0, learn_beta: bool = False) -> nn.Module:
    """Build the activation called ``name``; ``beta`` and ``learn_beta`` belong to ``swish`` alone.

    Raises:
        ValueError: an unknown name, or a beta for an activation that has none.
    """
    if name == "swish":
        return Swish(beta, learn_beta)
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{name}'; choose one of {', '.join(ACTIVATIONS)}")
    if beta != 1.0 or learn_beta:
        raise ValueError(f"beta and learn_beta belong to activation=swish, not to '{name}'")
    return ACTIVATIONS[name]()
