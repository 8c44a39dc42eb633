"""Give a peer our weights, then compare outputs and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
# our tensors by name -> the peer's: renamed, transposed, concatenated. Linear, so it maps gradients as well as weights.
ToPeer = Callable[[Tensors], Tensors]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def close(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> None:
    """Equal up to rounding, relative to the largest entry."""
    scale = theirs.detach().abs().max().item()
    assert scale > 0
    bound = TOLERANCE[ours.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound * scale)


@torch.no_grad()
def give_weights(ours: nn.Module, theirs: nn.Module, to_peer: ToPeer, std: float = 0.3) -> None:
    """Draw our weights, biases and norm gains included, and load them into the peer; no parameter of either is left."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    mapped = to_peer(dict(ours.named_parameters()))
    peers = dict(theirs.named_parameters())
    assert set(mapped) == set(peers)
    for name, parameter in peers.items():
        assert parameter.shape == mapped[name].shape, name
        parameter.copy_(mapped[name])


def gradients(module: nn.Module) -> Tensors:
    """By name; every parameter must have one."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert set(found) == {name for name, _ in module.named_parameters()}
    return found


def compare_all(ours: Tensors, theirs: Tensors, tolerance: float | None = None) -> None:
    """Each tensor of ours (already in the peer's names and layout) against the peer's."""
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        close(tensor, theirs[name], tolerance)


def compare_blocks(
    ours: nn.Module,
    theirs: nn.Module,
    to_peer: ToPeer,
    d_model: int,
    run_theirs: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Forward, gradient of the input, gradient of every parameter."""
    give_weights(ours, theirs, to_peer)
    dtype = next(ours.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, 7, d_model, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [ours(inputs[0]), (run_theirs or theirs)(inputs[1])]
    close(outputs[0], outputs[1])
    for output in outputs:
        output.backward(upstream)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    close(inputs[0].grad, inputs[1].grad)
    compare_all(to_peer(gradients(ours)), gradients(theirs))


def renamed(**names: str) -> ToPeer:
    """Rename the first parts of dotted names, e.g. ``gate="gate_proj"``."""

    def to_peer(tensors: Tensors) -> Tensors:
        return {f"{names[layer]}.{kind}": t for (layer, kind), t in ((n.rsplit(".", 1), t) for n, t in tensors.items())}

    return to_peer
