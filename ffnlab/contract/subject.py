"""The block on trial: built as often as an item needs it, with known weights, and watched while it runs.

Nothing is believed about a block but the contract: ``Block(d_model, d_ff, **options)`` with ``self.down``.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

DROPOUT_OPTIONS = ("dropout_hidden", "dropout_output")


class ContractError(Exception):
    """A block breaks the contract in a way that keeps an item from measuring; the text says how, ``fix`` what to do."""

    def __init__(self, text: str, fix: str = "see docs/adding-a-block.md, 'The contract'") -> None:
        super().__init__(text)
        self.fix = fix


@dataclass(frozen=True)
class Subject:
    """What is checked: a block class, its options and the sizes to build it at.

    Attributes:
        target: the class, called as ``target(d_model, d_ff, **options)``.
        options: what the YAML says besides ``_target_``.
        d_model: width of the residual stream.
        d_ff: number of neurons.
        compile_backend: given to ``torch.compile``.
    """

    target: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 24
    d_ff: int = 64
    compile_backend: str = "aot_eager"

    def accepts(self, option: str) -> bool:
        """Whether the constructor takes ``option``, by name, anywhere along its inheritance."""
        return option in self.options or option in _option_names(self.target)

    def construct(self, d_ff: int | None = None, **changes: Any) -> nn.Module:
        """Build the block as it comes, on the device and in the dtype that are the default at the call."""
        return self.target(self.d_model, self.d_ff if d_ff is None else d_ff, **{**self.options, **changes})

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
        """Build in train mode and give the weights known normal numbers: no item depends on an initialiser.

        Matrices get standard deviation ``fan_in ** -0.5``, biases 0.3. Other vectors and scalars (norm gains, a
        learned Swish beta) keep the value their block gave them.
        """
        block = self.construct(**changes).to(dtype).train()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if parameter.ndim >= 2:
                    std = 1 / math.sqrt(parameter.shape[-1])
                elif name.split(".")[-1].endswith("bias"):
                    std = 0.3
                else:
                    continue
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
        return block

    def no_dropout(self) -> dict[str, Any]:
        """Those options of the block that are dropout rates by our names, at zero."""
        return {name: 0.0 for name in DROPOUT_OPTIONS if self.accepts(name)}

    def quiet(self, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
        """Like ``build``, with every dropout rate set to zero (train mode)."""
        block = self.build(dtype, **{**self.no_dropout(), **changes})
        for module in block.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return block

    def tokens(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        """Standard normal input of shape ``(*shape, d_model)``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, self.d_model, generator=generator, dtype=torch.float64).to(dtype)


def _option_names(target: Callable[..., nn.Module]) -> set[str]:
    """Names of the constructor's arguments; ``**kwargs`` are followed to the base classes."""
    names: set[str] = set()
    for cls in target.__mro__ if isinstance(target, type) else ():
        constructor = vars(cls).get("__init__")
        if constructor is None:
            continue
        parameters = inspect.signature(constructor).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names - {"self"}


def down_of(block: nn.Module) -> nn.Linear:
    """The last projection that the contract asks for.

    Raises:
        ContractError: there is none.
    """
    down = getattr(block, "down", None)
    if not isinstance(down, nn.Linear):
        raise _without_down(block)
    return down


def _without_down(block: nn.Module) -> ContractError:
    """What the block has instead, and which of it to rename: the one projection that undoes all the others."""
    sizes = {name: (m.in_features, m.out_features) for name, m in block.named_children() if isinstance(m, nn.Linear)}
    last = [name for name, size in sizes.items() if list(sizes.values()).count(size) == 1]
    if len(sizes) == 2:  # each is the other's reverse; the one that leads out is made last
        last = list(sizes)[1:]
    others = [name for name in sizes if name not in last]
    if len(last) != 1 or not others or any(sizes[name] != sizes[last[0]][::-1] for name in others):
        return ContractError("there is no self.down = nn.Linear(d_ff, d_model)")
    llama = (sorted(sizes), last) == (["w1", "w2", "w3"], ["w2"])
    text = f"has {', '.join(sizes)} as Llama's" if llama else f"has {', '.join(sizes)}, and no down"
    roles = {name: role for role in ("gate", "up") for name in others if role in name.split("_") and name != role}
    if llama:
        roles = {"w1": "gate", "w3": "up"}
    elif len(others) == 1 and others != ["up"]:
        roles = {others[0]: "up"}
    rest = ", ".join(f"{name} to {role}" for name, role in roles.items())
    return ContractError(text, f"rename {last[0]} to down" + (f" ({rest})" if rest else ""))


@contextmanager
def watch(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect ``(input, output)`` of every call of ``module`` inside the ``with``."""
    calls: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda _module, args, output: calls.append((args[0], output)))
    try:
        yield calls
    finally:
        handle.remove()


def run(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``block`` on a copy of ``x``: its hidden vector, what ``down`` returned, and the block's output.

    Raises:
        ContractError: ``down`` was not called exactly once as a module, so no hook (and no census) can see its input.
    """
    with watch(down_of(block)) as calls:
        output = block(x.clone())
    if len(calls) != 1:
        raise ContractError(
            f"one forward pass calls self.down {len(calls)} times; the census needs exactly one call of the module "
            "(self.down(hidden), not F.linear on its weight)"
        )
    return calls[0][0], calls[0][1], output


def gap(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference, relative to the largest magnitude of ``b`` (1 if shapes or finiteness differ)."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return 1.0
    if a.numel() == 0:
        return 0.0
    scale = b.abs().max().item()
    return (a - b).abs().max().item() / (scale or 1.0)
