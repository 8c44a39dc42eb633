"""The dropout item: in train mode only, where and as often as configured, with the mean kept.

Bounds are six standard errors wide: with a handful of comparisons a correct block fails by chance less than once in
ten million runs (and the seeds are fixed besides).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, gap, run

SIGMAS = 6.0
TOKENS = 1024
RATES = {"dropout_hidden": 0.25, "dropout_output": 0.4}


def dropout(subject: Subject) -> Finding:
    """Choose the measurement that the block allows: by its options, or by the ``nn.Dropout`` modules inside it."""
    options = [name for name in RATES if subject.accepts(name)]
    if options:
        return _by_options(subject, options)
    block = subject.build()
    modules = [module for module in block.modules() if isinstance(module, nn.Dropout)]
    for module in modules:
        module.p = module.p or 0.25
    x = subject.tokens(8)
    if not modules and torch.equal(block(x.clone()), block(x.clone())):
        return Finding(None, "the block has no dropout")
    return _by_mean(subject, block)


def _mask(noisy: Tensor, clean: Tensor, rate: float, name: str) -> tuple[str, str]:
    """Compare what dropout left with what was there: (figure, complaint); the complaint is empty when all is well."""
    alive = clean.abs() > 1e-9  # a ReLU's own zeros say nothing about dropout
    ratio = (noisy[alive] / clean[alive]).double()
    n = ratio.numel()
    dropped, mean = (ratio == 0).double().mean().item(), ratio.mean().item()
    figure = f"{name}={rate}: drops {dropped:.3f}, mean kept to {mean:.3f}"
    if abs(dropped - rate) > SIGMAS * math.sqrt(rate * (1 - rate) / n):
        return figure, f"{name} is not applied at its rate"
    if abs(mean - 1) > SIGMAS * math.sqrt(rate / (1 - rate) / n):
        return figure, f"after {name} survivors must be scaled by 1 / (1 - rate)"
    by_neuron = (noisy == 0).double().sum(0)[alive.all(0)]
    if by_neuron.numel() and ((by_neuron == 0) | (by_neuron == len(noisy))).any():
        return figure, f"{name} uses one mask for all tokens"
    return figure, ""


def _by_options(subject: Subject, options: list[str]) -> Finding:
    """Each place alone, then all together, against the same weights without dropout."""
    x = subject.tokens(TOKENS)
    clean_hidden, _, clean_output = run(subject.quiet().eval(), x)
    figures, complaints = [], []
    for active in [[name] for name in options] + ([options] if len(options) > 1 else []):
        rates: dict[str, Any] = {name: RATES[name] if name in active else 0.0 for name in options}
        block = subject.build(**rates)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            hidden, projected, output = run(block, x)
        alone = len(active) == 1
        if "dropout_hidden" in active:
            figure, complaint = _mask(hidden, clean_hidden, RATES["dropout_hidden"], "dropout_hidden")
            figures += [figure] if alone else []
            complaints.append(complaint)
        elif gap(hidden, clean_hidden) != 0:
            complaints.append("hidden changes in train mode with dropout_hidden=0")
        if "dropout_output" in active:
            figure, complaint = _mask(output, projected, RATES["dropout_output"], "dropout_output")
            figures += [figure] if alone else []
            complaints.append(complaint)
        elif gap(output, projected) != 0:
            complaints.append("the output changes in train mode with dropout_output=0")
        block.eval()
        evaluated = run(block, x)[2]
        if gap(evaluated, clean_output) != 0:
            complaints.append("dropout acts in eval mode")
    found = list(dict.fromkeys(text for text in complaints if text))
    return Finding(not found, "; ".join(figures), "; ".join(found))


def _by_mean(subject: Subject, block: nn.Module) -> Finding:
    """A block with dropout of its own: off in eval, on in train, and the output's mean over draws is the clean one."""
    token = subject.tokens(1)
    many = token.expand(4 * TOKENS, -1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noisy = block.train()(many.clone())
        clean = block.eval()(many.clone())
        again = block(many.clone())
    if not torch.equal(clean, again):
        return Finding(False, "two eval passes differ", "dropout must act in train mode only")
    spread = noisy.std(0)
    if not spread.any():
        return Finding(False, "a dropout module that drops nothing", "call the dropout module in forward")
    error = spread / math.sqrt(len(many))
    z = ((noisy.mean(0) - clean[0]).abs() / error.clamp_min(1e-12)).max().item()
    return Finding(
        z <= SIGMAS,
        f"mean over {len(many)} draws is {z:.1f} standard errors from the eval output (allowed {SIGMAS:.0f})",
        "keep the mean: scale survivors by 1 / (1 - rate), and drop hidden or output, not what an activation bends",
    )
