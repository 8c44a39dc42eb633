"""Run a model over a fixed set of tokens and count its neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ffnlab.census.accumulator import NeuronAccumulator
from ffnlab.census.batches import call, count, first_row, positions, spread, to_device, unpack
from ffnlab.census.figures import Columns, figures, with_mean
from ffnlab.census.gradient import gradient_norms
from ffnlab.census.health import Moments, NonFiniteError, health_figures
from ffnlab.census.layers import Layer, find_layers, first_argument, has_exact_zero, matching
from ffnlab.errors import UserError


class CensusError(UserError):
    """A census did not see what it had to see: a hook that did not fire, a token too many or too few."""


@dataclass
class Census:
    """What a census found: the per-neuron table, see `figures.COLUMNS`, and activation health."""

    table: Columns
    names: list[str]  # of the down projections, in layer order
    health: dict[str, float] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Tokens counted."""
        return int(self.table["n"][0])

    def figures(self) -> dict[str, float]:
        """Every figure, `dead/rel_L0` per layer and `dead/rel` as the mean, with `census/n`."""
        return figures(self.table)


def census(
    model: nn.Module,
    batches: Iterable[Any],
    down: Sequence[str],
    *,
    n: int | None = None,
    blocks: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    gradient_batches: int = 8,
    forward: Callable[..., Any] | None = None,
    exact_zero: Sequence[bool] | None = None,
    shared: bool = False,
) -> Census:
    """Count the neurons of any PyTorch model on the first `n` tokens of `batches` (all by default).

    The model runs in eval mode, float32 and eagerly, and is left as it was found; no random numbers are drawn.

    Args:
        model: any module whose down projections can be named.
        batches: each a tensor of tokens `(B, T)` (or vectors `(B, T, d)`), a pair `(inputs, targets)` in which
            targets of -100 do not count, a pair `(inputs, mask)` with a bool mask, or a mapping of keyword
            arguments in which `attention_mask` 0 and `labels` -100 do not count.
        down: patterns of the down projections' names, `h.*.mlp.c_proj`; the end of a name is enough.
        n: number of tokens; more than there are means all.
        blocks: patterns of the Transformer blocks; with them `health` is filled in.
        loss: the loss of a batch; with it `dead/gradient` is measured on `gradient_batches` single sequences.
        gradient_batches: the M of gradient death.
        forward: called instead of the model, e.g. a method that stops before the head.
        exact_zero: per layer, whether hidden can be exactly zero on a half line; by default the block is asked.
        shared: the processes of `torch.distributed` each take a part of the batches and join their counts.

    Raises:
        UserError: a pattern that matches nothing; no tokens.
        CensusError: a layer was skipped or did not see exactly `n` tokens.
        NonFiniteError: the first layer and tensor that held a NaN or an infinity.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps
    batches = batches if iter(batches) is not batches else list(batches)
    n_tokens, n_batches = count(batches, n)
    sampled = spread(n_batches, gradient_batches) if loss is not None else set()
    layers = find_layers(model, down)
    block_modules = [module for _, module in matching(model, blocks)] if blocks else []
    if block_modules and len(block_modules) != len(layers):
        raise UserError(f"{len(block_modules)} blocks but {len(layers)} down projections; name one block for each.")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with _measuring(model, device):
        if exact_zero is None:
            exact_zero = [has_exact_zero(layer) for layer in layers]
        probe = _Probe(layers, block_modules, n_tokens, device)
        rows = _run(probe, forward or model, batches, sampled, device, shared)
        gradients = gradient_norms(layers, rows, loss) if loss else [None] * len(layers)
    return probe.result(exact_zero, gradients)


class _Probe:
    """The hooks of one census and what they have counted."""

    def __init__(self, layers: list[Layer], blocks: list[nn.Module], n_tokens: int, device: torch.device) -> None:
        self.layers, self.blocks, self.n_tokens = layers, blocks, n_tokens
        self.counts = [NeuronAccumulator(layer.d_ff, n_tokens, device) for layer in layers]
        tensors = ("ffn_input", "hidden", "ffn_output", "residual") if blocks else ()
        self.moments = [{tensor: Moments(index, tensor, device) for tensor in tensors} for index in range(len(layers))]
        self.pre: dict[int, Tensor] = {}
        self.seen = [0] * len(layers)

    def attach(self, stack: ExitStack) -> None:
        """Hook every layer until the stack closes."""
        for index, layer in enumerate(self.layers):
            # each hook is defined in a method so that it keeps its own index
            if layer.pre is not None and layer.pre_is_input:
                stack.enter_context(layer.pre.register_forward_pre_hook(self._pre_input(index), with_kwargs=True))
            elif layer.pre is not None:
                stack.enter_context(layer.pre.register_forward_hook(self._pre_output(index)))
            stack.enter_context(layer.down.register_forward_pre_hook(self._hidden(index), with_kwargs=True))
            if self.blocks:
                stack.enter_context(layer.ffn.register_forward_hook(self._ffn_output(index)))
                stack.enter_context(layer.ffn.register_forward_pre_hook(self._ffn_input(index), with_kwargs=True))
                stack.enter_context(self.blocks[index].register_forward_hook(self._residual(index)))

    def start_batch(self, mask: Tensor | None, n_positions: int, start: int) -> None:
        """Tell the hooks which positions count and where the batch begins among the N tokens."""
        self.mask, self.n_positions, self.start = mask, n_positions, start
        self.seen = [0] * len(self.layers)
        self.pre.clear()

    def end_batch(self) -> None:
        """Raise `CensusError` unless every layer was seen exactly once."""
        for layer, seen, index in zip(self.layers, self.seen, range(len(self.layers)), strict=True):
            if seen != 1:
                raise CensusError(f"'{layer.name}' ran {seen} times in one forward pass; the census needs exactly one")
            if layer.pre is not None and index not in self.pre:
                raise CensusError(f"the activation beside '{layer.name}' did not run, so its input cannot be read")

    def _select(self, tensor: Any, index: int) -> Tensor:
        """The counting positions as `(tokens, features)`, cut at N."""
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        if len(rows) != self.n_positions:
            raise CensusError(
                f"'{self.layers[index].name}' saw {len(rows)} vectors for a batch of {self.n_positions} positions"
            )
        rows = rows if self.mask is None else rows[self.mask]
        return rows[: self.n_tokens - self.start]

    def _pre_input(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep_pre(first_argument(args, kwargs), index)

        return hook

    def _pre_output(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._keep_pre(output, index)

        return hook

    def _keep_pre(self, tensor: Tensor, index: int) -> None:
        pre = self._select(tensor, index)
        _check_finite(pre, index, "pre_activation")
        self.pre[index] = pre

    def _hidden(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = self._select(first_argument(args, kwargs), index)
            _check_finite(hidden, index, "hidden")
            pre = self.pre.get(index)
            # an activation of another width (one that does the gating itself) has no pre-activation per neuron
            pre = pre if pre is not None and pre.shape == hidden.shape else None
            self.counts[index].update(hidden, pre, self.start)
            if self.blocks:
                self.moments[index]["hidden"].update(hidden)
            self.seen[index] += 1

        return hook

    def _ffn_input(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.moments[index]["ffn_input"].update(self._select(first_argument(args, kwargs), index))

        return hook

    def _ffn_output(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self.moments[index]["ffn_output"].update(self._select(output, index))

        return hook

    def _residual(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self.moments[index]["residual"].update(self._select(output, index))

        return hook

    def all_reduce(self) -> None:
        """Join the counts of all processes."""
        for counts in self.counts:
            counts.all_reduce()
        for layer in self.moments:
            for moments in layer.values():
                moments.all_reduce()

    def result(self, exact_zero: Sequence[bool], gradients: Sequence[Tensor | None]) -> Census:
        """Assemble the table; raises `CensusError` unless every layer counted exactly N tokens."""
        parts = []
        for index, (layer, counts) in enumerate(zip(self.layers, self.counts, strict=True)):
            if counts.n != self.n_tokens:
                raise CensusError(f"'{layer.name}' counted {counts.n} tokens instead of {self.n_tokens}")
            columns = counts.columns(layer.column_norm(), exact_zero[index], gradients[index])
            parts.append({"layer": np.full(layer.d_ff, index)} | columns)
        table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        health = with_mean(health_figures(self.moments)) if self.blocks else {}
        return Census(table, [layer.name for layer in self.layers], health)


def _run(
    probe: _Probe,
    forward: Callable[..., Any],
    batches: Iterable[Any],
    sampled: set[int],
    device: torch.device,
    shared: bool,
) -> list[Any]:
    """Pass the batches through and return the first sequence of each of those in `sampled`."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    rows: list[Any] = []
    failure: Exception | None = None
    start = 0
    with ExitStack() as stack, torch.no_grad():
        probe.attach(stack)
        for index, batch in enumerate(batches):
            if start >= probe.n_tokens:
                break
            inputs, mask = unpack(batch)
            counting = int(mask.sum()) if mask is not None else positions(inputs)
            if index in sampled and counting:
                rows.append(to_device(first_row(batch), device))
            if index % world == rank and counting and failure is None:
                try:
                    flat = None if mask is None or bool(mask.all()) else mask.reshape(-1).to(device)
                    probe.start_batch(flat, positions(inputs), start)
                    call(forward, to_device(inputs, device))
                    probe.end_batch()
                except (NonFiniteError, CensusError) as error:
                    if world == 1:
                        raise
                    failure = error  # the other processes wait for this one: tell them first
            start += counting
    if shared:
        failures: list[Exception | None] = [None] * world
        dist.all_gather_object(failures, failure)
        for first in failures:
            if first is not None:
                raise first
        probe.all_reduce()
    return rows


@contextmanager
def _measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, float32 all the way, eager; everything is put back afterwards."""
    training = {module: module.training for module in model.modules()}
    tensors = [*model.parameters(), *model.buffers()]
    other = [(tensor, tensor.data) for tensor in tensors if _is_other_float(tensor)]
    precision = torch.get_float32_matmul_precision()
    model.eval()
    torch.set_float32_matmul_precision("highest")
    try:
        # Under a compiled module hooks are silently skipped; this stance runs it eagerly, hooks included.
        # Lightning validates in inference mode, in which no gradient could be taken.
        with (
            torch.compiler.set_stance("force_eager"),
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
        ):
            for tensor, data in other:
                tensor.data = data.float()
            yield
    finally:
        for tensor, data in other:
            tensor.data = data
        torch.set_float32_matmul_precision(precision)
        for module, was_training in training.items():
            module.training = was_training


def _is_other_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _check_finite(values: Tensor, layer: int, tensor: str) -> None:
    if not bool(values.abs().amax().isfinite()):
        raise NonFiniteError(layer, tensor)
