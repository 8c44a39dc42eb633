"""Solve ``d_ff`` so that every block costs the same.

An FFN's parameter count and its FLOP count are affine in ``d_ff``. Two builds on the meta device therefore give slope
and intercept for any block, biases and learnable scalars included, without a formula per block. The reference is a
bias-free dense block with ``d_ff = 4 d_model`` (Vaswani et al. 2017): ``8 d_model**2`` parameters.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ffnlab.errors import UserError
from ffnlab.ffn import BlockFactory, DenseFFN

BudgetKind = Literal["params", "flops", "none"]
Count = Callable[[BlockFactory, int, int], int]  # (factory, d_model, d_ff) -> cost of one block


@dataclass(frozen=True)
class Budget:
    """What one FFN layer costs beside the reference.

    ``params`` and ``flops`` (forward, one token, a multiply-add counts two) are counted at ``d_ff``; ``mismatch`` is
    the signed relative difference of the budgeted quantity from the reference's (of the parameters for ``none``).
    """

    kind: BudgetKind
    d_ff: int
    params: int
    flops: int
    reference_params: int
    reference_flops: int
    mismatch: float
    matched: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the ledger."""
        return asdict(self)


def build_on_meta(factory: BlockFactory, d_model: int, d_ff: int) -> nn.Module:
    """Build a block without memory for its weights and without drawing a random number.

    Raises:
        UserError: the constructor fails there, or the result has no ``down: nn.Linear(d_ff, d_model)``.
    """
    try:
        with torch.device("meta"):
            block = factory(d_model, d_ff)
    except ValueError as error:
        raise UserError(str(error)) from error
    down = getattr(block, "down", None)
    if not isinstance(down, nn.Linear):
        raise UserError(
            f"{type(block).__name__} has no 'down': the contract asks for a last projection "
            "self.down = nn.Linear(d_ff, d_model), which the budget, the initialisation and the census read"
        )
    if "weight" not in dict(down.named_parameters(recurse=False)):
        raise UserError(
            f"{type(block).__name__}.down has no weight of its own (weight_norm, a parametrisation?), which the "
            "initialisation sets: put what it does into forward"
        )
    if (down.in_features, down.out_features) != (d_ff, d_model):
        raise UserError(
            f"{type(block).__name__}.down is nn.Linear({down.in_features}, {down.out_features}), "
            f"but was asked for d_ff={d_ff}, d_model={d_model}"
        )
    return block


def count_params(factory: BlockFactory, d_model: int, d_ff: int) -> int:
    """Parameters of one block, each tensor once."""
    return sum(p.numel() for p in build_on_meta(factory, d_model, d_ff).parameters())


def count_flops(factory: BlockFactory, d_model: int, d_ff: int) -> int:
    """Forward FLOPs of one block on one token; matrix products only, a multiply-add counts two."""
    block = build_on_meta(factory, d_model, d_ff).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        block(torch.empty(1, d_model, device="meta"))
    return int(counter.get_total_flops())


def affine(count: Callable[[int], int], multiple_of: int = 1) -> tuple[float, float]:
    """Slope and intercept of ``count(d_ff)``, from two points that a block with such multiples of neurons can have."""
    low = math.ceil(64 / multiple_of) * multiple_of
    high = 2 * low
    first, second = count(low), count(high)
    slope = (second - first) / (high - low)
    return slope, first - slope * low


def _dense(d_model: int, d_ff: int) -> nn.Module:
    return DenseFFN(d_model, d_ff)


def _fit(count: Count, factory: BlockFactory, d_model: int, multiple_of: int) -> tuple[int, float]:
    """The rounded ``d_ff`` nearest to the reference's cost, and its signed relative mismatch."""
    target = count(_dense, d_model, 4 * d_model)
    slope, intercept = affine(lambda d_ff: count(factory, d_model, d_ff), multiple_of)
    if slope <= 0:
        raise UserError("the budget cannot be met: the block does not grow with d_ff (is d_ff used?)")
    exact = (target - intercept) / slope
    d_ff = max(1, round(exact / multiple_of)) * multiple_of
    return d_ff, count(factory, d_model, d_ff) / target - 1


def solve(
    factory: BlockFactory,
    d_model: int,
    kind: BudgetKind = "params",
    multiple_of: int = 8,
    tolerance: float = 0.01,
    d_ff: int | None = None,
) -> Budget:
    """Find the ``d_ff`` at which ``factory``'s block costs what the reference costs.

    Args:
        factory: ``(d_model, d_ff) -> nn.Module``.
        d_model: width of the residual stream.
        kind: ``params``, ``flops`` (per token, forward), or ``none``: take ``d_ff`` as given, label the run unmatched.
        multiple_of: round ``d_ff`` to the nearest multiple.
        tolerance: largest relative mismatch that is accepted.
        d_ff: the width for ``kind="none"``; must be left out otherwise.

    Raises:
        UserError: the budget cannot be met within ``tolerance``; the message names what could meet it.
    """
    if kind == "none":
        if d_ff is None:
            raise UserError("budget=none needs the width: add budget.d_ff=N")
        width = d_ff
        mismatch = count_params(factory, d_model, width) / count_params(_dense, d_model, 4 * d_model) - 1
    else:
        if d_ff is not None:
            raise UserError(f"budget={kind} solves d_ff; to set it, use budget=none budget.d_ff={d_ff}")
        count = count_params if kind == "params" else count_flops
        width, mismatch = _fit(count, factory, d_model, multiple_of)
        if abs(mismatch) > tolerance:
            raise UserError(
                f"budget={kind} cannot be met at d_model={d_model} with multiple_of={multiple_of}: the nearest d_ff, "
                f"{width}, is off by {mismatch:+.1%}, more than tolerance={tolerance:.1%}. "
                f"Use {_advice(count, factory, d_model, multiple_of, tolerance)}"
            )
    return Budget(
        kind=kind,
        d_ff=width,
        params=count_params(factory, d_model, width),
        flops=count_flops(factory, d_model, width),
        reference_params=count_params(_dense, d_model, 4 * d_model),
        reference_flops=count_flops(_dense, d_model, 4 * d_model),
        mismatch=mismatch,
        matched=kind != "none",
    )


def _advice(count: Count, factory: BlockFactory, d_model: int, multiple_of: int, tolerance: float) -> str:
    """Say what would match: the largest smaller ``multiple_of``, and the nearest ``d_model``."""
    ways = []
    for smaller in (m for m in (128, 64, 32, 16, 8, 4, 2, 1) if m < multiple_of):
        d_ff, mismatch = _fit(count, factory, d_model, smaller)
        if abs(mismatch) <= tolerance:
            ways.append(f"budget.multiple_of={smaller} (d_ff={d_ff})")
            break
    for other in sorted(range(8, 4 * d_model + 1, 8), key=lambda d: (abs(d - d_model), d)):
        d_ff, mismatch = _fit(count, factory, other, multiple_of)
        if abs(mismatch) <= tolerance and other != d_model:
            ways.append(f"model.d_model={other} (d_ff={d_ff})")
            break
    return " or ".join(ways) or "a larger budget.tolerance"
