"""Items about learning: who gets a gradient, whether it is right, and what a zero-initialised ``down`` does."""

import torch
from torch import Tensor, nn

from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, down_of


def _gradients(block: nn.Module, x: Tensor, target: Tensor) -> dict[str, float]:
    """Largest absolute gradient of a squared error, by parameter; NaN where not finite, 0 where there is none."""
    block.zero_grad()
    (block(x.clone()) - target).square().mean().backward()
    largest = {}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            largest[name] = 0.0
        else:
            largest[name] = gradient.abs().max().item() if gradient.isfinite().all() else float("nan")
    return largest


def _zero_down(block: nn.Module) -> None:
    with torch.no_grad():
        for parameter in down_of(block).parameters():
            parameter.zero_()


def gradient_flow(subject: Subject) -> Finding:
    """Every parameter, and the input, receives a finite, non-zero gradient."""
    block = subject.quiet()
    trainable = [name for name, p in block.named_parameters() if p.requires_grad]
    frozen = [name for name, p in block.named_parameters() if not p.requires_grad]
    x = subject.tokens(4, 16).requires_grad_()
    largest = _gradients(block, x, subject.tokens(4, 16, seed=2))
    bad = [f"{name} gets {'none' if largest[name] == 0 else 'a non-finite one'}" for name in trainable]
    bad = [text for text, name in zip(bad, trainable, strict=True) if not largest[name] > 0]
    bad += [f"{name} is frozen" for name in frozen]
    if x.grad is None or not x.grad.isfinite().all() or not x.grad.any():
        bad.append("the input gets none")
    smallest = min((largest[name] for name in trainable), default=0.0)
    return Finding(
        not bad and bool(trainable),
        "; ".join(bad) or f"{len(trainable)} tensors, the smallest maximum is {smallest:.1e}",
        "look for a detach(), a torch.no_grad(), .data, an argmax, or a parameter that forward does not use",
    )


def zero_initialisation(subject: Subject) -> Finding:
    """With ``down`` at zero the output is exactly zero."""
    block = subject.quiet()
    _zero_down(block)
    largest = block(subject.tokens(2, 5)).abs().max().item()
    return Finding(
        largest == 0.0,
        f"largest output {largest:.1e} with down at zero",
        "everything must pass through down: no skip, bias or scale beside it",
    )


def zero_down_start(subject: Subject) -> Finding:
    """With ``down`` at zero only ``down`` learns at step 0; after one step everything does."""
    block = subject.quiet()
    _zero_down(block)
    x, target = subject.tokens(4, 16), subject.tokens(4, 16, seed=2)
    at_start = _gradients(block, x, target)
    inside = [name for name in at_start if name.startswith("down.")]
    early = [name for name in at_start if name not in inside and at_start[name] != 0]
    late = [name for name in inside if not at_start[name] > 0]
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    after = _gradients(block, x, target)
    dead = [name for name in after if not after[name] > 0]
    measured = (
        f"step 0: gradient in {', '.join(n for n in at_start if at_start[n] != 0) or 'nothing'}; "
        f"step 1: in {len(after) - len(dead)} of {len(after)} tensors"
    )
    if dead:
        measured += f", not in {', '.join(dead)}"
    return Finding(
        not (early or late or dead),
        measured,
        "after the first update of down, gradient must reach every parameter, and only through down",
    )


def numerical_gradient(subject: Subject) -> Finding:
    """Analytic and numerical gradients agree in float64, with respect to the input and to every parameter."""
    # Central differences along random directions: a full Jacobian of every parameter takes minutes at real widths.
    block = subject.quiet()
    x = subject.tokens(6).requires_grad_()
    weight = subject.tokens(6, seed=3)
    generator = torch.Generator().manual_seed(4)
    block.zero_grad()
    (block(x.clone()) * weight).sum().backward()
    step, worst, where = 1e-6, 0.0, "the input"
    for name, tensor in (("the input", x), *block.named_parameters()):
        if tensor.grad is None:
            worst, where = 1.0, name
            continue
        errors = []
        for _ in range(5):
            direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            analytic = (tensor.grad * direction).sum().item()
            with torch.no_grad():
                kept = tensor.clone()
                tensor.copy_(kept + step * direction)
                above = (block(x.clone()) * weight).sum().item()
                tensor.copy_(kept - step * direction)
                below = (block(x.clone()) * weight).sum().item()
                tensor.copy_(kept)
            numerical = (above - below) / (2 * step)
            errors.append(abs(analytic - numerical) / max(abs(numerical), abs(analytic), 1e-3))
        error = sorted(errors)[2]  # the median: a direction may cross a kink of ReLU; a wrong gradient errs in all
        if not error <= worst:
            worst, where = error, name
    return Finding(
        worst <= 1e-5,
        f"off by {worst:.1e} at most ({where})",
        "forward and backward disagree: look for detach(), .data, in-place edits or a custom backward",
    )
