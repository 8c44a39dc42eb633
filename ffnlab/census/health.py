"""Activation health: moments of the tensors around each FFN, and the stop at the first one that is not finite."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class NonFiniteError(RuntimeError):
    """A tensor holds NaN or infinity. `layer` and `tensor` say where the first one was met."""

    def __init__(self, layer: int, tensor: str) -> None:
        super().__init__(f"{tensor} of layer {layer} is not finite")
        self.layer = layer
        self.tensor = tensor

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, str]]:
        """Survive pickling: processes pass exceptions to each other."""
        return type(self), (self.layer, self.tensor)


class Moments:
    """Running count, power sums and largest absolute value of all entries of one tensor."""

    def __init__(self, layer: int, tensor: str, device: torch.device | str = "cpu") -> None:
        self.layer, self.tensor = layer, tensor
        self.device = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        self.count = 0
        self.powers = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.largest = torch.zeros((), dtype=torch.float64, device=self.device)

    def update(self, values: Tensor) -> None:
        """Add all entries. Raises `NonFiniteError`."""
        largest = values.detach().abs().amax().to(self.device)
        if not bool(largest.isfinite()):
            raise NonFiniteError(self.layer, self.tensor)
        x = values.detach().reshape(-1).to(self.device).double()
        x2 = x * x
        self.powers += torch.stack([x.sum(), x2.sum(), x @ x2, x2 @ x2])
        self.largest = torch.maximum(self.largest, largest.double())
        self.count += len(x)

    def all_reduce(self) -> None:
        """Join the processes of `torch.distributed`."""
        count = torch.tensor([self.count], device=self.device)
        dist.all_reduce(count, dist.ReduceOp.SUM)
        dist.all_reduce(self.powers, dist.ReduceOp.SUM)
        dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        self.count = int(count)

    @property
    def rms(self) -> float:
        """Root mean square of the entries."""
        return math.sqrt(float(self.powers[1]) / self.count)

    @property
    def maximum(self) -> float:
        """Largest absolute value."""
        return float(self.largest)

    @property
    def kurtosis(self) -> float | None:
        """Fourth central moment over the squared variance (3 for a normal); None for a constant."""
        m1, m2, m3, m4 = (self.powers / self.count).tolist()
        variance = m2 - m1**2
        if variance <= 1e-12 * m2:
            return None
        return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2


def health_figures(layers: list[dict[str, Moments]]) -> list[dict[str, float]]:
    """Figures of each layer from its moments (`residual`, `hidden`, `ffn_input`, `ffn_output`)."""
    rows = []
    for moments in layers:
        residual, hidden = moments["residual"], moments["hidden"]
        row = {
            "health/residual_rms": residual.rms,
            "health/residual_max": residual.maximum,
            "health/hidden_rms": hidden.rms,
            "health/hidden_max": hidden.maximum,
        }
        if hidden.kurtosis is not None:
            row["health/hidden_kurtosis"] = hidden.kurtosis
        if moments["ffn_input"].rms > 0:
            # input and output have the same number of entries, so the ratio of RMS is the ratio of norms
            row["health/ffn_ratio"] = moments["ffn_output"].rms / moments["ffn_input"].rms
        rows.append(row)
    return rows
