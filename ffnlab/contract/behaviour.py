"""Items about what the block computes: shapes, tokens, determinism, nonlinearity."""

from collections.abc import Callable

import torch
from torch import Tensor

from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, gap, run

EXACT = 1e-10  # relative, float64: rounding of another summation order, and nothing more
LINEAR = 1e-6  # relative: a map closer to linear than this has no nonlinearity worth the name


def shapes(subject: Subject) -> Finding:
    """(d), (B, d) and (B, T, d) come back as they went in."""
    block = subject.quiet().eval()
    wrong = []
    for leading in ((), (3,), (2, 5)):
        given = (*leading, subject.d_model)
        try:
            output = block(subject.tokens(*leading))
        except (RuntimeError, IndexError, ValueError) as error:
            wrong.append(f"{given} raises {type(error).__name__}")
            continue
        if tuple(output.shape) != given:
            wrong.append(f"{given} -> {tuple(output.shape)}")
    return Finding(
        not wrong,
        "; ".join(wrong) or "(d), (B, d), (B, T, d) kept",
        "work on the last dimension only, whatever stands before it",
    )


def dtype_and_device(subject: Subject) -> Finding:
    """The output has the dtype and device of the input."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    wrong = []
    for device in devices:
        for dtype in dtypes:
            block = subject.quiet(dtype).eval().to(device)
            try:
                output = block(subject.tokens(2, dtype=dtype).to(device))
            except RuntimeError as error:
                wrong.append(f"{dtype} on {device} raises: {str(error).splitlines()[0][:80]}")
                continue
            if output.dtype != dtype or output.device.type != device:
                wrong.append(f"{dtype} on {device} -> {output.dtype} on {output.device.type}")
    return Finding(
        not wrong,
        "; ".join(wrong).replace("torch.", "") or f"{len(dtypes)} dtypes on {' and '.join(devices)} kept",
        "make constants with the dtype and device of x, and cast back what you cast",
    )


def token_independence(subject: Subject) -> Finding:
    """Each token alone gives what it gives among others, and changing one changes no other."""
    worst = 0.0
    stuck = False
    for training in (False, True):  # a batch statistic would show in train mode only
        block = subject.quiet().train(training)
        x = subject.tokens(2, 5)
        together = block(x.clone()).detach()
        alone = torch.stack([block(token[None]).detach()[0] for token in x.clone().flatten(0, 1)]).unflatten(0, (2, 5))
        worst = max(worst, gap(alone, together))
        for sequence, position in ((0, 0), (0, 4), (1, 2)):
            changed = x.clone()
            changed[sequence, position] = 3.0 * changed[sequence, position] + 1.0
            other = torch.ones(2, 5, dtype=torch.bool)
            other[sequence, position] = False
            output = block(changed).detach()
            worst = max(worst, gap(output[other], together[other]))
            stuck |= torch.equal(output[sequence, position], together[sequence, position])
    if stuck:
        return Finding(False, "a changed token keeps its output", "the output must depend on the input")
    return Finding(
        worst <= EXACT,
        f"other tokens move by {worst:.1e} (allowed {EXACT:.0e})",
        "an FFN sees one token at a time: no mixing, shifting or statistics across batch or positions",
    )


def _linearity(function: Callable[[Tensor], Tensor], subject: Subject) -> tuple[float, float]:
    """Relative violation of additivity and homogeneity of ``function`` less its value at zero."""
    x, y = subject.tokens(64), subject.tokens(64, seed=2)
    with torch.no_grad():
        at_zero = function(torch.zeros_like(x))
        fx, fy = function(x) - at_zero, function(y) - at_zero
        both, scaled = function(x + y) - at_zero, function(-2 * x) - at_zero
    size = (fx.norm() + fy.norm()).item() or 1.0
    # -2, not 2: a ReLU is homogeneous for positive factors, an odd function for -1
    return (both - fx - fy).norm().item() / size, (scaled + 2 * fx).norm().item() / size


def nonlinear(subject: Subject) -> Finding:
    """The block as a whole is no linear (or affine) map."""
    block = subject.quiet().eval()
    additivity, homogeneity = _linearity(lambda x: block(x.clone()), subject)
    return Finding(
        min(additivity, homogeneity) > LINEAR,
        f"additivity off by {additivity:.2f}, homogeneity by {homogeneity:.2f} (a linear map: 0)",
        "the block is a linear map: the activation is missing, or has no effect",
    )


def nonlinear_hidden(subject: Subject) -> Finding:
    """The nonlinearity stands before ``down``: hidden is not linear in the input."""
    block = subject.quiet().eval()
    additivity, homogeneity = _linearity(lambda x: run(block, x)[0], subject)
    return Finding(
        min(additivity, homogeneity) > LINEAR,
        f"additivity of hidden off by {additivity:.2f}, homogeneity by {homogeneity:.2f}",
        "what enters down is linear in the input: put the activation before down, not after it",
    )


def deterministic(subject: Subject) -> Finding:
    """Equal input, equal output: in eval mode with the rates configured, and in train mode without dropout."""
    x = subject.tokens(2, 5)
    worst = {}
    for mode, block in (("eval", subject.build().eval()), ("train without dropout", subject.quiet())):
        first = block(x.clone()).detach()
        worst[mode] = max(gap(block(x.clone()).detach(), first) for _ in range(4))
    return Finding(
        max(worst.values()) == 0.0,
        ", ".join(f"{mode}: repeats differ by {value:.1e}" for mode, value in worst.items()),
        "draw random numbers in dropout only, respect self.training, and keep no counters",
    )


def pure(subject: Subject) -> Finding:
    """A forward pass leaves the input, the block's own state, module globals and the random stream as they were."""
    damage: list[str] = []
    for training in (False, True):
        block = subject.quiet().train(training)
        x = subject.tokens(2, 5)
        given = x.clone()
        before = _state(block)
        stream = torch.get_rng_state()
        with torch.no_grad():
            block(given)
        if not torch.equal(given, x):
            damage.append("its input")
        after = _state(block)
        damage += [name for name in before if after.get(name) != before[name]]
        damage += [name for name in after if name not in before]
        if not torch.equal(torch.get_rng_state(), stream):
            damage.append("the random stream")
    changed = list(dict.fromkeys(damage))
    return Finding(
        not changed,
        f"forward changes {', '.join(changed)}" if changed else "input, state and random stream untouched",
        "compute a result and change nothing: no in-place operation on x, no counter, no cache",
    )


def _state(block: torch.nn.Module) -> dict[str, str]:
    """A printable snapshot of everything a forward pass could change: tensors, attributes, class and module globals."""
    found: dict[str, str] = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[f"the tensor {name}"] = f"{tensor.dtype} {tensor.detach().double().sum().item()!r}"
    for path, module in block.named_modules():
        cls = type(module)
        scopes = {f"self.{path}.".replace("..", "."): vars(module)}
        if not cls.__module__.startswith("torch."):
            scopes[f"{cls.__name__}."] = dict(vars(cls))
            scopes["the global "] = getattr(cls.forward, "__globals__", {})
        for prefix, scope in scopes.items():
            for key, value in scope.items():
                if key.startswith("__"):
                    continue
                if isinstance(value, bool | int | float | str):
                    found[prefix + key] = repr(value)
                elif isinstance(value, list | dict | set) and not key.startswith("_"):
                    found[prefix + key] = f"{type(value).__name__} of {len(value)}"
                elif isinstance(value, torch.Tensor):
                    found[prefix + key] = repr(value.detach().double().sum().item())
    return found
