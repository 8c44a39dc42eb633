"""The matrix products of a training step, and how fast the machine does them when it does nothing else."""

from collections.abc import Callable, Sequence
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
    """A matrix, or a batch of them, as a product sees it: its place in memory, and how it lies there."""

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Operand":
        """``tensor`` as it is now."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def extent(self) -> int:
        """Elements from its first to its last."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Product:
    """``left @ right = out``, of two matrices or of two batches of them."""

    left: Operand
    right: Operand
    out: Operand

    @property
    def flops(self) -> int:
        """A multiplication and an addition per term."""
        *batch, m, k = self.left.shape
        return 2 * torch.Size(batch).numel() * m * k * self.right.shape[-1]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        factors = None
        if func in (aten.mm.default, aten.bmm.default):
            factors = args[:2]
        elif func in (aten.addmm.default, aten.baddbmm.default):
            factors = args[1:3]
        if factors is not None:
            self.seen.append(Product(*(Operand.of(tensor) for tensor in (*factors, result))))
        return result


def step_products(loop: BareLoop) -> list[Product]:
    """Every matrix product of one step's forward and backward pass, in their order.

    Those of attention are among them where attention is made of products; where it is one fused kernel they are not.
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


def lay_out(products: Sequence[Product], device: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random operands for ``products``, and somewhere for each result.

    What lay in one place during the step lies in one place here, and what did not does not, so that the products find
    in the caches what they found there: doing one product again and again on the same numbers is faster than any step.
    """
    sizes: dict[tuple[int, torch.dtype], int] = {}
    for product in products:
        for operand in (product.left, product.right, product.out):
            key = operand.place, operand.dtype
            sizes[key] = max(sizes.get(key, 0), operand.extent)
    places = {key: torch.empty(size, dtype=key[1], device=device).normal_() for key, size in sizes.items()}

    def lay(operand: Operand) -> Tensor:
        return places[operand.place, operand.dtype].as_strided(operand.shape, operand.stride)

    return [(lay(p.left), lay(p.right), lay(p.out)) for p in products]


def product_runner(products: Sequence[Product], device: str) -> Callable[[int], None]:
    """A function that does ``products`` ``n`` times over."""
    work = lay_out(products, device)

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
