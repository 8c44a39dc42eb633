"""Peak memory of training against vocabulary and context, one fresh process for each point."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from ffnlab.bench.setting import Setting
from ffnlab.model import build


@dataclass(frozen=True)
class MemoryPoint:
    """Peak memory of two training steps; on the CPU above what the process held before, on a GPU what was allocated."""

    vocab_size: int
    context_length: int
    checkpoint_blocks: bool
    peak_mib: float


def measure_memory(
    setting: Setting, vocab_sizes: Sequence[int], context_lengths: Sequence[int], tokens_per_step: int = 4096
) -> list[MemoryPoint]:
    """The shape's network at each vocabulary (at its own context), and at each context (at its own vocabulary).

    Tokens per step are held equal, so that a longer context means fewer sequences. Contexts are measured with and
    without ``train.checkpoint_blocks``.
    """
    model = setting.config().model
    points = [(v, model.context_length, False) for v in vocab_sizes]
    points += [(vocab_sizes[0], c, remake) for c in context_lengths for remake in (False, True)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        peaks = list(pool.map(_peak, [(setting, *point, tokens_per_step) for point in points]))
    return [MemoryPoint(*point, peak) for point, peak in zip(points, peaks, strict=True)]


def _peak(job: tuple[Setting, int, int, bool, int]) -> float:
    from ffnlab.ffn import make_block
    from ffnlab.training.optim import make_optimizer

    setting, vocab_size, context_length, checkpoint_blocks, tokens_per_step = job
    setting.apply()
    cfg = setting.config(f"model.context_length={context_length}")
    factory = make_block(cfg.ffn.target, cfg.ffn.options)
    network = build(cfg.model, vocab_size, factory, 4 * cfg.model.d_model, 0).to(setting.device)
    network.checkpoint_blocks = checkpoint_blocks
    optimizer = make_optimizer(network, cfg.optim)
    rows = max(1, tokens_per_step // context_length)
    tokens = torch.randint(vocab_size, (rows, context_length + 1), device=setting.device)
    before = 0 if setting.device == "cuda" else setting.peak_bytes()  # what imports and the network took
    for _ in range(2):
        with setting.autocast():
            loss = network.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (setting.peak_bytes() - before) / 2**20
