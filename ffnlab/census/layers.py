"""Which modules a census reads: the down projections that were named, and what surrounds each."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError


@dataclass(frozen=True)
class Layer:
    """One FFN as the census sees it."""

    name: str  # dotted name of `down`
    down: nn.Module
    ffn: nn.Module  # the module that holds `down`
    d_ff: int
    pre: nn.Module | None  # where the pre-activations are read
    pre_is_input: bool  # they are what enters `pre` (an activation), not what leaves it (a gate)

    def column_norm(self) -> Tensor:
        """Norm of each neuron's column in `down`, `(d_ff,)` float64."""
        return weight_of(self.down).detach().double().norm(dim=1 if is_conv1d(self.down) else 0)

    def incoming(self) -> list[Tensor]:
        """Weights that lead into the neurons, each `(d_ff, d_model)` or transposed; empty if none is found."""
        weights = []
        for module in self.ffn.modules():
            if module is not self.down and is_projection(module) and widths(module)[1] == self.d_ff:
                weights.append(weight_of(module))
        return [weight for weight in weights if weight.requires_grad]


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's projection in `transformers`: a linear layer with its weight transposed, `(in, out)`."""
    return type(module).__name__ == "Conv1D" and getattr(module, "weight", torch.empty(0)).ndim == 2


def is_projection(module: nn.Module) -> bool:
    """Whether the module is a matrix product whose widths are known here."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def weight_of(module: nn.Module) -> Tensor:
    """The weight matrix of a projection."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(module).__name__}.weight is not a tensor")
    return weight


def widths(module: nn.Module) -> tuple[int, int]:
    """Input and output width of a projection."""
    rows, columns = weight_of(module).shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def matching(model: nn.Module, patterns: Sequence[str], projections: bool = False) -> list[tuple[str, nn.Module]]:
    """Modules whose dotted name, or its end, matches a pattern; `*` stands for one or part of one component.

    `h.*.mlp.c_proj` finds `transformer.h.0.mlp.c_proj`. The order is the model's own. Raises `UserError` with
    the candidates when a pattern matches nothing.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name, _ in named if _matches(name, pattern)}
        if not hits:
            pool = [name for name, module in named if is_projection(module) or not projections]
            candidates = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")[1:] for name in pool})
            raise UserError(f"'{pattern}' matches no module. Candidates: {', '.join(candidates) or 'none'}.")
        found |= hits
    return [(name, module) for name, module in named if name in found]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    tail = parts[-len(wanted) :]
    return len(tail) == len(wanted) and all(map(fnmatchcase, tail, wanted))


def find_layers(model: nn.Module, down: Sequence[str]) -> list[Layer]:
    """The layers whose down projections match `down`. Raises `UserError` for a module that is no projection."""
    layers = []
    for name, module in matching(model, down, projections=True):
        if not is_projection(module):
            raise UserError(
                f"'{name}' is a {type(module).__name__}, not a projection. "
                "Name the nn.Linear (or Conv1D) that maps d_ff to d_model."
            )
        ffn = model.get_submodule(name.rpartition(".")[0])
        layers.append(describe(name, module, ffn))
    return layers


def describe(name: str, down: nn.Module, ffn: nn.Module) -> Layer:
    """Find the pre-activations: what enters submodule `act`, else what leaves `gate`, else none."""
    act, gate = getattr(ffn, "act", None), getattr(ffn, "gate", None)
    pre = act if isinstance(act, nn.Module) else gate if isinstance(gate, nn.Module) else None
    return Layer(name, down, ffn, widths(down)[0], pre, pre is not None and pre is act)


def block_down(ffn: nn.Module) -> nn.Linear:
    """Return the block's `down`. Raises `UserError` that quotes the contract if there is none."""
    down = getattr(ffn, "down", None)
    if not isinstance(down, nn.Linear):
        raise UserError(
            f"{type(ffn).__name__} has no `down` projection to read its neurons from. "
            "A block's last projection must be `self.down = nn.Linear(d_ff, d_model)`."
        )
    return down


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a hooked module was given, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()))


@torch.no_grad()
def has_exact_zero(layer: Layer) -> bool:
    """Whether the hidden can be exactly zero on a half line, as with ReLU, so that `dead/exact` means something.

    A submodule `act` is asked directly: does it give exactly 0 on all of [-4, -1], or of [1, 4]? In float64,
    because in float32 GELU underflows to 0 below about -5.5 and would pass for a ReLU. A block without `act` is
    run on 64 standard normal vectors: at least a tenth of the entries of neurons that fire at all must be 0.
    The answer depends on the kind of block alone, not on what it has learned.
    """
    if isinstance(layer.pre, nn.Module) and layer.pre_is_input:
        line_N1 = torch.linspace(1, 4, 13, dtype=torch.float64)[:, None]
        act = copy.deepcopy(layer.pre).cpu().double().eval()
        halves = (act(side.expand(-1, layer.d_ff)) for side in (-line_N1, line_N1))
        return any(bool((half == 0).all()) for half in halves)
    ffn = copy.deepcopy(layer.ffn).cpu().double().eval()
    down = ffn.get_submodule(layer.name.rpartition(".")[2])
    x_ND = torch.randn(64, widths(down)[1], generator=torch.Generator().manual_seed(0)).double()
    hidden: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(first_argument(args, kwargs).reshape(-1, layer.d_ff))

    with down.register_forward_pre_hook(keep, with_kwargs=True):
        try:
            ffn(x_ND)
        except Exception:  # somebody else's module that is no FFN on its own: not knowing means not reporting
            return False
    zero_NF = torch.cat(hidden) == 0
    fires = ~zero_NF.all(0)
    return bool(fires.any()) and float(zero_NF[:, fires].double().mean()) >= 0.1
