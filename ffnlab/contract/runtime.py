"""Items about the places a block must survive: meta device, ``torch.compile``, ``vmap``, half precision."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, gap

CLOSE = 1e-9  # relative, float64: another order of summation, several layers deep


def meta_device(subject: Subject) -> Finding:
    """Builds without memory, gives shapes there, and is a real block again once real weights are put in."""
    with torch.device("meta"):
        hollow = subject.construct(**subject.no_dropout())
    off = [n for n, t in (*hollow.named_parameters(), *hollow.named_buffers()) if t.device.type != "meta"]
    if off:
        return Finding(False, f"{', '.join(off)} not on meta", "create tensors without naming a device")
    shape = tuple(hollow.eval()(torch.empty(2, 5, subject.d_model, device="meta")).shape)
    real = subject.quiet().eval()
    hollow.load_state_dict(real.state_dict(), strict=True, assign=True)
    left = [n for n, t in (*hollow.named_parameters(), *hollow.named_buffers()) if t.device.type == "meta"]
    if left:
        return Finding(
            False,
            f"{', '.join(left)} cannot be filled from a state dict",
            "keep constants as Python numbers or persistent buffers: these have no value after a meta build",
        )
    x = subject.tokens(2, 5)
    worst = gap(hollow(x.clone()), real(x.clone()))
    return Finding(
        shape == (2, 5, subject.d_model) and worst == 0.0,
        f"shape {shape}; filled from a state dict it differs by {worst:.1e}",
        "build from sizes alone; do not read values at construction",
    )


def _output_and_gradients(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    block.zero_grad()
    output = block(x.clone())
    output.square().sum().backward()
    return {"output": output.detach()} | {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in block.named_parameters()
    }


def compiles(subject: Subject) -> Finding:
    """One graph, the same numbers forward and backward, and no second compilation for a second call."""
    block = subject.quiet()
    x = subject.tokens(2, 5)
    eager = _output_and_gradients(block, x)
    torch.compiler.reset()
    compiled: Any = torch.compile(copy.deepcopy(block), backend=subject.compile_backend, fullgraph=True)
    try:
        fused = _output_and_gradients(compiled, x)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(x.clone())
    except Exception as error:  # dynamo raises many kinds; each is the block's failure here
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Finding(
            False,
            f"{type(error).__name__}: {text[:120]}",
            "no branches on tensor values, no printing, no state changed in forward",
        )
    finally:
        torch.compiler.reset()
    fused = {name.removeprefix("_orig_mod."): value for name, value in fused.items()}
    worst = max(gap(fused[name], value) for name, value in eager.items())
    return Finding(
        worst <= CLOSE,
        f"{subject.compile_backend}: output and gradients differ by {worst:.1e}",
        "eager and compiled code disagree: look for state, in-place edits or custom kernels",
    )


def vectorises(subject: Subject) -> Finding:
    """Two blocks stacked and run by ``vmap`` give what each gives alone, forward and backward."""
    blocks = [subject.quiet(seed=0), subject.quiet(seed=1)]
    x = torch.stack([subject.tokens(2, 5, seed=seed) for seed in (5, 6)])
    alone = [_output_and_gradients(block, part) for block, part in zip(blocks, x, strict=True)]
    parameters, buffers = stack_module_state(blocks)
    skeleton = blocks[0]

    def loss(weights: dict[str, Tensor], constants: dict[str, Tensor], part: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(skeleton, (weights, constants), (part.clone(),))
        return output.square().sum(), output

    gradients, outputs = vmap(grad(loss, has_aux=True))(parameters, buffers, x)
    worst = 0.0
    for i, expected in enumerate(alone):
        worst = max(worst, gap(outputs[i], expected["output"]))
        worst = max([worst, *(gap(gradients[name][i], expected[name]) for name in gradients)])
    return Finding(
        worst <= CLOSE,
        f"2 stacked blocks: output and gradients differ by {worst:.1e}",
        "use tensor operations only: no .item(), no branch on values, no in-place writes into fresh buffers",
    )


def half_precision(subject: Subject) -> Finding:
    """float16 and bfloat16 stay finite, forward and backward, on normal inputs of standard deviation 1 and 4."""
    largest, wrong = {}, []
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        block = subject.quiet(dtype)
        for scale in (1.0, 4.0):
            block.zero_grad()
            output = block(subject.tokens(4, 16, dtype=dtype) * scale)
            output.float().mean().backward()
            finite = bool(output.isfinite().all())
            finite &= all(bool(p.grad.isfinite().all()) for p in block.parameters() if p.grad is not None)
            if not finite:
                wrong.append(f"{name} overflows at input scale {scale:g}")
            largest[name] = output.abs().max().item()
    return Finding(
        not wrong,
        "; ".join(wrong)
        or "finite; largest output " + ", ".join(f"{value:.1f} in {name}" for name, value in largest.items()),
        "avoid exp, powers and large constants before a normalisation; 65504 is float16's largest number",
    )
