"""Bad numbers: stop within the step, and say where they began."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """Tell of every bad tensor that goes into a module or comes out of one, in the order in which they come to be.

    A module's own arithmetic shows in what it hands on: to the next module inside it, or to the outside.
    """

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            if any(_bad(value) for value in (*inputs, *named.values())):
                see(f"{name} input")

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if any(_bad(value) for value in (output if isinstance(output, tuple) else (output,))):
                see(f"{name} output")

        return before, after

    with ExitStack() as stack:
        for name, module in network.named_modules():
            if name:
                before, after = hooks(name)
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after))
        yield


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
