"""Where a step's time goes: by phase with a clock, by kind of work with the profiler."""

import time
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent

from ffnlab.bench.contenders import BareLoop, make_loop
from ffnlab.bench.race import Spread
from ffnlab.bench.setting import Setting

PHASES = ("data", "forward", "backward", "clipping", "optimiser")

# Kernels by the work they do; the first pattern that a kernel's name contains decides.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("matrix products", ("::mm", "::addmm", "::bmm", "::baddbmm", "mkldnn", "gemm")),
    ("fused attention", ("scaled_dot_product", "flash_attention", "efficient_attention")),
    ("activation", ("gelu", "silu", "relu", "sigmoid", "tanh")),
    ("softmax and cross-entropy", ("softmax", "nll_loss", "cross_entropy", "logsumexp")),
    ("norms", ("layer_norm", "rms_norm")),
    ("optimiser and clipping", ("adamw", "linalg_vector_norm", "foreach", "clip")),
    ("embedding", ("embedding", "index_select")),
    ("copies and fills", ("copy_", "fill_", "::cat", "zero_", "clone")),
    ("additions and products by element", ("::add", "::mul", "::div", "::sub")),
)
REST = "views, allocation, autograd and Python"


@dataclass(frozen=True)
class Split:
    """Milliseconds a step: by phase (median and quartiles), and by kind of work (means, of a profiled step)."""

    phases: dict[str, Spread]
    kinds: dict[str, float]

    @property
    def largest_other(self) -> str:
        """The largest kind that is no matrix product."""
        return max((kind for kind in self.kinds if kind != "matrix products"), key=lambda kind: self.kinds[kind])


def kind_of(kernel: str) -> str:
    """The kind of work that a kernel called ``kernel`` does."""
    return next((kind for kind, patterns in KINDS if any(p in kernel for p in patterns)), REST)


def split_step(setting: Setting, n_steps: int, name: str = "bare") -> Split:
    """Measure ``n_steps`` steps of contender ``name``."""
    setting.apply()
    loop = make_loop(name, setting)
    loop.run(3)
    return Split(_phases(loop, n_steps), _kinds(loop, max(3, n_steps // 3)))


def _phases(loop: BareLoop, n_steps: int) -> dict[str, Spread]:
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}

    mark = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal mark
        loop.setting.synchronise()
        now = time.perf_counter()
        times[phase].append(1e3 * (now - mark))
        mark = now

    for _ in range(n_steps):
        mark = time.perf_counter()
        batch = loop.batch()
        lap("data")
        loss = loop.forward(*batch)
        lap("forward")
        loss.backward()
        lap("backward")
        loop.clip()
        lap("clipping")
        loop.update()
        lap("optimiser")
    return {phase: Spread.of(values) for phase, values in times.items()}


def _kinds(loop: BareLoop, n_steps: int) -> dict[str, float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = loop.setting.device == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        loop.run(n_steps)
        loop.setting.synchronise()
    kinds = dict.fromkeys([kind for kind, _ in KINDS] + [REST], 0.0)
    event: FunctionEvent
    for event in profile.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kinds[kind_of(event.key.lower())] += microseconds / 1e3 / n_steps
    return kinds
