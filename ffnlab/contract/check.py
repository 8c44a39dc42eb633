"""Run the checklist over one block."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ffnlab.contract import behaviour, gradients, runtime, structure
from ffnlab.contract.dropout import dropout
from ffnlab.contract.likeness import like as likeness
from ffnlab.contract.report import Finding, Outcome, Report, Status
from ffnlab.contract.subject import ContractError, Subject
from ffnlab.errors import UserError

Item = Callable[[Subject], Finding]
CONTRACT = "down is last"  # the item that speaks for all that need ``down`` and cannot have it

ITEMS: dict[str, Item] = {
    "shapes": behaviour.shapes,
    "dtype and device": behaviour.dtype_and_device,
    "token independence": behaviour.token_independence,
    "nonlinear": behaviour.nonlinear,
    "nonlinear before down": behaviour.nonlinear_hidden,
    "formula": structure.formula,
    "down is last": structure.down_is_last,
    "pre-activation": structure.pre_activation,
    "gate side": structure.gate_side,
    "deterministic": behaviour.deterministic,
    "pure": behaviour.pure,
    "dropout": dropout,
    "bias": structure.bias,
    "no sharing": structure.no_sharing,
    "parameter count": structure.count,
    "gradient flow": gradients.gradient_flow,
    "numerical gradient": gradients.numerical_gradient,
    "zero down: output": gradients.zero_initialisation,
    "zero down: gradient": gradients.zero_down_start,
    "meta device": runtime.meta_device,
    "compile": runtime.compiles,
    "vmap": runtime.vectorises,
    "half precision": runtime.half_precision,
}


def check(
    target: Callable[..., nn.Module],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    d_model: int = 24,
    d_ff: int = 64,
    compile_backend: str = "aot_eager",
    items: Mapping[str, Item] = ITEMS,
    like: str | None = None,
) -> Report:
    """Hold a block against the contract.

    Args:
        target: the block's class, called as ``target(d_model, d_ff, **options)``.
        options: its options, as a YAML gives them besides ``_target_``.
        name: what to call it in the report; by default the name of the class.
        d_model: width to build it at; small is enough, since nothing here depends on scale.
        d_ff: number of neurons to build it with. Avoid ``4 * d_model``, which a block that ignores ``d_ff`` may use.
        compile_backend: ``aot_eager`` (about a second: traces forward and backward) or ``inductor``
            (also generates code; up to a minute the first time, needs a C++ compiler).
        items: the checklist, by name.
        like: a block of ours, ``conf/ffn``: whether ``target`` computes the same is one more item.

    Returns:
        One outcome an item. A block that cannot be built fails ``builds``, and nothing else is tried.

    Raises:
        UserError: no block of ours is called ``like``.
    """
    start = time.perf_counter()
    if like is not None:
        items = {f"like {like}": likeness(like), **items}  # first: it is what was asked
    subject = Subject(target, dict(options or {}), d_model, d_ff, compile_backend)
    outcomes = [_judge("builds", _builds, subject)]
    if outcomes[0].status == "pass":
        kept_from: list[str] = []
        outcomes += [_judge(item, function, subject, kept_from) for item, function in items.items()]
        if CONTRACT in kept_from:
            # One cause, one failure: the others had nothing to measure on
            kept_from.remove(CONTRACT)
            said = f"not measured: see '{CONTRACT}'"
            outcomes = [
                replace(outcome, status="not measured", measured=said, fix="") if outcome.name in kept_from else outcome
                for outcome in outcomes
            ]
    label = name or getattr(target, "__name__", str(target))
    return Report(label, d_model, d_ff, tuple(outcomes), time.perf_counter() - start, like)


def _builds(subject: Subject) -> Finding:
    block = subject.construct()
    if not isinstance(block, nn.Module):
        return Finding(False, f"{type(block).__name__} is no nn.Module", "derive the class from torch.nn.Module")
    return Finding(True, f"{type(block).__name__}({subject.d_model}, {subject.d_ff})")


def _judge(name: str, item: Item, subject: Subject, kept_from: list[str] | None = None) -> Outcome:
    """Run one item by itself: whatever it raises is its own failure and stops nothing else.

    An item that a broken contract keeps from measuring is noted in ``kept_from``.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            finding = item(subject)
    except ContractError as error:
        if kept_from is not None:
            kept_from.append(name)
        finding = Finding(False, str(error), error.fix)
    except UserError as error:
        finding = Finding(False, str(error), "see docs/adding-a-block.md, 'The contract'")
    except Exception as error:  # a stranger's code: anything may come
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        finding = Finding(
            False,
            f"{type(error).__name__}: {text[:120]}",
            f"raised at {Path(frame.filename).name}:{frame.lineno}",
        )
    status: Status = "n/a" if finding.passed is None else "pass" if finding.passed else "fail"
    return Outcome(name, status, finding.measured, finding.fix if status == "fail" else "")
