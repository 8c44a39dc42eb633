"""Bad numbers: stop within the step, and say where they began."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.training.batches import Batch
from ffnlab.training.parallel import whole


class Diverged(Exception):
    """Training met a loss, gradient or activation that is not finite.

    ``step`` is the optimiser step that was being computed, ``tensor`` the first bad tensor by its name in the network,
    ``lr`` the rate of that step. The weights are those of the step before: the update was not made.
    """

    def __init__(self, step: int, tensor: str, lr: float) -> None:
        super().__init__(f"diverged in step {step}: {tensor} is not finite (learning rate {lr:g})")
        self.step, self.tensor, self.lr = step, tensor, lr

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the ledger."""
        return {"step": self.step, "tensor": self.tensor, "lr": self.lr}


def _bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(whole(value)).all())


@contextmanager
def _watched(network: nn.Module, see: Callable[[str], None]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if _bad(output):
                see(f"{name} output")

        return look

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in network.named_modules()
        if name and not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_nonfinite(network: nn.Module, batches: Sequence[Batch]) -> str:
    """Name the first tensor that is not finite: a weight, else in a forward pass in order, else a gradient.

    Runs an eager forward pass on each of ``batches``, the parts of the step, with the gradients left as they are.
    """
    for name, parameter in network.named_parameters():
        if _bad(parameter):
            return f"weight {name}"
    seen: list[str] = []
    for batch in batches:
        with torch.compiler.set_stance("force_eager"), _watched(network, seen.append):
            loss = network.loss(*batch)  # type: ignore[operator]
        if seen:
            return seen[0]
        if _bad(loss):
            return "loss"
    for name, parameter in reversed(list(network.named_parameters())):  # the order in which backward reaches them
        if parameter.grad is not None and _bad(parameter.grad):
            return f"gradient of {name}"
    return "gradient norm"
