"""Items about how the block is made: its last projection, its gate, its parameters and their number."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ffnlab.budget import affine, count_params
from ffnlab.contract.behaviour import EXACT
from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, down_of, gap, run, watch
from ffnlab.ffn import DenseFFN, GatedFFN

# The declared mathematics, written out a second time on purpose: the check must not lean on the code it checks.
FORMULAS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda x, _: x.clamp(min=0),
    "leaky_relu": lambda x, _: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x, _: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x, _: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x, _: x / (1 + torch.exp(-x)),
    "swish": lambda x, beta: x / (1 + torch.exp(-beta * x)),
    "relu2": lambda x, _: x.clamp(min=0) ** 2,
    "sigmoid": lambda x, _: 1 / (1 + torch.exp(-x)),
    "tanh": lambda x, _: torch.tanh(x),
    "identity": lambda x, _: x,
}


def down_is_last(subject: Subject) -> Finding:
    """The block's output is what ``down`` made of hidden, and hidden has ``d_ff`` entries: what the census reads."""
    block = subject.quiet().eval()
    down = down_of(block)
    sizes = (down.in_features, down.out_features)
    if sizes != (subject.d_ff, subject.d_model):
        return Finding(
            False,
            f"down is nn.Linear{sizes}, asked for d_ff {subject.d_ff}, d_model {subject.d_model}",
            "build self.down = nn.Linear(d_ff, d_model) from the sizes you are given",
        )
    x = subject.tokens(2, 5)
    hidden, projected, output = run(block, x)
    if tuple(hidden.shape) != (2, 5, subject.d_ff):
        return Finding(False, f"hidden has shape {tuple(hidden.shape)}", "call down on a (..., d_ff) tensor")
    expected = nn.functional.linear(hidden, down.weight, down.bias)
    worst = max(gap(projected, expected), gap(output, expected))
    return Finding(
        worst <= EXACT,
        f"output differs from down(hidden) by {worst:.1e}; hidden has {subject.d_ff} neurons",
        "return self.down(hidden) itself (dropout apart): nothing may follow it or be added to it",
    )


def pre_activation(subject: Subject) -> Finding:
    """``act`` receives one ``(..., d_ff)`` tensor: the output of ``gate`` where there is one, else that of ``up``."""
    block = subject.quiet().eval()
    act = getattr(block, "act", None)
    if not isinstance(act, nn.Module):
        return Finding(None, "no submodule 'act': the census takes the output of 'gate' where there is one")
    source = next((name for name in ("gate", "up") if isinstance(getattr(block, name, None), nn.Linear)), None)
    x = subject.tokens(2, 5)
    with watch(act) as calls, torch.no_grad():
        block(x.clone())
    if len(calls) != 1 or tuple(calls[0][0].shape) != (2, 5, subject.d_ff):
        seen = [tuple(given.shape) for given, _ in calls]
        return Finding(False, f"act receives {seen or 'nothing'}", "call self.act once, on a (..., d_ff) tensor")
    if source is None:
        return Finding(True, f"act receives {subject.d_ff} pre-activations")
    linear: nn.Linear = getattr(block, source)
    worst = gap(calls[0][0], nn.functional.linear(x, linear.weight, linear.bias))
    return Finding(
        worst <= EXACT,
        f"input of act differs from {source}(x) by {worst:.1e}",
        f"apply act to {source}(x); are gate and up swapped?",
    )


def gate_side(subject: Subject) -> Finding:
    """In a gated block the activation sits on ``gate``: hidden is linear in ``up``, unless it is linear in neither.

    Measured from the parameters alone: scaling everything in ``up`` by -1.5 must scale hidden by -1.5. With no
    activation (bilinear) both sides are linear and the question has no answer to get wrong.
    """
    block = subject.quiet().eval()
    if not all(isinstance(getattr(block, name, None), nn.Linear) for name in ("gate", "up")):
        return Finding(None, "no pair of projections named 'gate' and 'up'")
    x = subject.tokens(32)
    off = {}
    with torch.no_grad():
        hidden = run(block, x)[0]
        for side in ("gate", "up"):
            scaled = {k: p * -1.5 for k, p in block.named_parameters() if k.startswith(f"{side}.")}
            with watch(down_of(block)) as calls:
                functional_call(block, scaled, (x.clone(),))
            off[side] = gap(calls[0][0], -1.5 * hidden)
    return Finding(
        off["up"] <= EXACT or off["gate"] > EXACT,
        f"hidden off linearity in gate by {off['gate']:.1e}, in up by {off['up']:.1e}",
        "gate and up are swapped: the activation belongs on gate, hidden = act(gate(x)) * up(x)",
    )


def formula(subject: Subject) -> Finding:
    """Our own classes compute ``down(act(up x))`` or ``down(act(gate x) * up x)`` with the activation declared."""
    block = subject.quiet().eval()
    if not isinstance(block, DenseFFN | GatedFFN):
        return Finding(None, "a block of yours declares none to be held to")
    default = "silu" if isinstance(block, GatedFFN) else "relu"
    name = str(subject.options.get("activation", default))
    learned = dict(block.named_parameters()).get("act.beta")
    beta = float(subject.options.get("beta", 1.0)) if learned is None else learned.item()
    if name not in FORMULAS:
        return Finding(None, f"no formula on record for activation '{name}'")
    weights = dict(block.named_parameters())
    x = subject.tokens(64) * 2

    def project(layer: str, value: Tensor) -> Tensor:
        return nn.functional.linear(value, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))

    with torch.no_grad():
        if isinstance(block, GatedFFN):
            hidden = FORMULAS[name](project("gate", x), beta) * project("up", x)
        else:
            hidden = FORMULAS[name](project("up", x), beta)
        worst = gap(block(x.clone()), project("down", hidden))
    gated = "act(gate x) * up x" if isinstance(block, GatedFFN) else "act(up x)"
    return Finding(
        worst <= EXACT,
        f"down({gated}), act = {name}: off by {worst:.1e}",
        "the block does not compute what its class and activation declare",
    )


def bias(subject: Subject) -> Finding:
    """The ``bias`` option is obeyed: none when false, and one that acts when true."""
    if not subject.accepts("bias"):
        return Finding(None, "the constructor has no option 'bias'")
    without, with_bias = subject.construct(bias=False), subject.quiet(bias=True)
    kept = [name for name, _ in without.named_parameters() if name.split(".")[-1].endswith("bias")]
    known = {name for name, _ in without.named_parameters()}
    added = {name: p for name, p in with_bias.named_parameters() if name not in known}
    with_bias(subject.tokens(8)).square().sum().backward()
    idle = [name for name, p in added.items() if p.grad is None or not p.grad.any()]
    measured = f"false: {', '.join(kept) or 'none'}; true: adds {', '.join(added) or 'none'}"
    if idle:
        measured += f", of which {', '.join(idle)} has no effect"
    return Finding(
        not kept and bool(added) and not idle,
        measured,
        "pass bias on to every nn.Linear, so that false leaves none and true adds one to each",
    )


def no_sharing(subject: Subject) -> Finding:
    """Every parameter has memory of its own, within a block and between two blocks."""
    owners: list[tuple[int, int, str]] = []
    shared = []
    total = 0
    blocks = [("", subject.construct()), ("another block's ", subject.construct())]
    for label, block in blocks:
        for name, parameter in block.named_parameters(remove_duplicate=False):
            start = parameter.data_ptr()
            end = start + parameter.numel() * parameter.element_size()
            shared += [f"{label}{name} is {owner}" for low, high, owner in owners if start < high and low < end]
            owners.append((start, end, label + name))
            total += label == ""
    return Finding(
        not shared,
        "; ".join(shared) or f"{total} tensors, each with memory of its own",
        "make a separate nn.Parameter (or nn.Linear) for each; sharing changes the count and the gradient",
    )


def count(subject: Subject) -> Finding:
    """The parameters of a real block are as many as the budget's line through two meta builds says."""

    def factory(d_model: int, d_ff: int) -> nn.Module:
        return subject.target(d_model, d_ff, **subject.options)

    down_of(subject.construct())  # without one no budget is solved
    slope, intercept = affine(lambda d_ff: count_params(factory, subject.d_model, d_ff))
    if slope <= 0:
        return Finding(False, f"{slope:g} parameters a neuron", "the block ignores d_ff: build from it")
    wrong = []
    for d_ff in (subject.d_ff, 4 * subject.d_ff + 8):
        counted = sum(p.numel() for p in subject.construct(d_ff).parameters())
        if counted != slope * d_ff + intercept:
            wrong.append(f"{counted} at d_ff {d_ff}, the budget says {slope * d_ff + intercept:g}")
    counted = sum(p.numel() for p in subject.construct().parameters())
    return Finding(
        not wrong,
        "; ".join(wrong) or f"{counted} = {slope:g} d_ff + {intercept:g}",
        "the number of parameters must be affine in d_ff, or no budget can be solved for it",
    )
