"""The matrix products of a training step, and how fast the machine does them when it does nothing else."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ffnlab.bench.contenders import BareLoop
from ffnlab.bench.setting import Setting

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A matrix as a product sees it: transposed ones have their strides swapped."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: str) -> Tensor:
        """A random one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).normal_()


@dataclass(frozen=True)
class Product:
    """``left @ right``, of two matrices or of two batches of them."""

    left: Operand
    right: Operand

    @property
    def flops(self) -> int:
        """A multiplication and an addition per term."""
        *batch, m, k = self.left.shape
        return 2 * torch.Size(batch).numel() * m * k * self.right.shape[-1]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = None
        if func in (aten.mm.default, aten.bmm.default):
            operands = args[:2]
        elif func in (aten.addmm.default, aten.baddbmm.default):
            operands = args[1:3]
        if operands is not None:
            left, right = (Operand(tuple(t.shape), tuple(t.stride()), t.dtype) for t in operands)
            self.seen[Product(left, right)] += 1
        return func(*args, **(kwargs or {}))


def step_products(loop: BareLoop) -> Counter[Product]:
    """Every matrix product of one step's forward and backward pass, with how often it comes.

    Attention's own products are inside one fused kernel and are not among them.
    """
    recorder = _Recorder()
    batch = loop.batch()
    with recorder:
        loop.forward(*batch).backward()
    loop.optimizer.zero_grad()
    return recorder.seen


def step_flops(loop: BareLoop) -> int:
    """FLOPs of one step's forward and backward pass as PyTorch counts them, attention included."""
    counter = FlopCounterMode(display=False)
    batch = loop.batch()
    with counter:
        loop.forward(*batch).backward()
    loop.optimizer.zero_grad()
    return int(counter.get_total_flops())


def product_runner(products: Counter[Product], device: str) -> Callable[[int], None]:
    """A function that does the products of ``n`` steps, each into a buffer of its own."""
    work = []
    for product, count in products.items():
        left, right = product.left.make(device), product.right.make(device)
        work += [(left, right, left @ right)] * count

    def run(n_steps: int) -> None:
        for _ in range(n_steps):
            for left, right, out in work:
                torch.matmul(left, right, out=out)

    return run


def square_rate(setting: Setting, size: int, repeats: int = 10) -> float:
    """FLOP/s of one large square product, bfloat16 on a GPU and float32 on the CPU; the best of ``repeats``."""
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    out = left @ right
    best = float("inf")
    for _ in range(repeats):
        setting.synchronise()
        began = setting.now()
        torch.matmul(left, right, out=out)
        setting.synchronise()
        best = min(best, setting.now() - began)
    return 2 * size**3 / best
