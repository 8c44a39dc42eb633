"""Per-neuron counts and maxima of one layer, in memory that does not depend on how many tokens pass.

Everything kept is a maximum, a count or a float64 sum, so it does not matter how tokens are split into
batches or over processes. Two of the figures are relative to the layer's RMS over *all* tokens, which
is known only at the end:

- `dead/rel` needs the largest |hidden| of each neuron alone, so it is exact;
- `sparsity/rel` needs the number of entries below 1e-3 RMS. Instead of running the network twice, each
  neuron keeps a histogram of its small entries on a fixed logarithmic grid: the float32 numbers whose
  mantissa has 5 bits, 32 in every octave. The counts are exact integers; the threshold is rounded to
  the nearest grid value (at most 1.6% away), and the one used stands in the table.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ffnlab.census.figures import REL, Columns, layer_figures

_DROPPED_BITS = 23 - 5  # of the float32 mantissa: what is left indexes the grid
# The window of the histogram reaches from 4e-3 of the RMS so far down 12 octaves. It is placed only when _FIRST vectors
# are there (they wait until then), so that one odd token or a small first batch does not decide.
_WINDOW = 12 * 32
_HEADROOM = 4
_FIRST = 256


def _grid_index(value: float) -> int:
    return int(np.float32(value).view(np.int32)) >> _DROPPED_BITS


def _grid_value(index: int) -> float:
    return float(np.int32(index << _DROPPED_BITS).view(np.float32))


class NeuronAccumulator:
    """Statistics of the `d_ff` neurons of one layer.

    Feed `update` with hidden vectors in any split, then read `columns` (per neuron) or `result` (figures).
    With `n_tokens` = N the first N tokens count, later ones are ignored, and the figures include the
    curve over the first N/16 and N/4 tokens. `device` is where the sums live; give the model's own.
    """

    def __init__(self, d_ff: int, n_tokens: int | None = None, device: torch.device | str = "cpu") -> None:
        # Token ranges [0, N/16), [N/16, N/4), [N/4, N): kept apart, so the order of arrival is free.
        self.edges = [math.ceil(n_tokens / 16), math.ceil(n_tokens / 4), n_tokens] if n_tokens else []
        self.d_ff, self.n_tokens, self.n = d_ff, n_tokens, 0
        self.device = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        shape = (max(len(self.edges), 1), d_ff)
        self.max_abs = torch.zeros(shape, device=self.device)
        self.max_pre = torch.full(shape, -math.inf, device=self.device)
        self.sum_squares = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.sum_abs = torch.zeros(d_ff, dtype=torch.float64, device=self.device)
        self.zeros = torch.zeros(d_ff, dtype=torch.int64, device=self.device)
        self._small = torch.zeros(d_ff, _WINDOW, dtype=torch.int32, device=self.device)
        self._waiting: list[Tensor] = []  # |hidden| of the first vectors
        self._top = 0  # grid index just above the window; 0 before it is placed
        self._lowest_top = 0  # where it was placed first: entries above were not all kept

    def update(self, hidden: Tensor, pre: Tensor | None = None, start: int | None = None) -> None:
        """Count hidden vectors `(..., d_ff)` and, where the block has them, their pre-activations.

        `start` is the position of the first vector among the N tokens; by default they follow on from
        what was counted. Raises `ValueError` for a wrong width and for values that are not finite.
        """
        hidden_TF = hidden.detach().reshape(-1, hidden.shape[-1]).to(self.device, torch.float32)
        if hidden_TF.shape[1] != self.d_ff:
            raise ValueError(f"hidden vectors have {hidden_TF.shape[1]} features, expected {self.d_ff}")
        pre_TF = None
        if pre is not None:
            pre_TF = pre.detach().reshape(-1, pre.shape[-1]).to(self.device, torch.float32)
            if pre_TF.shape != hidden_TF.shape:
                raise ValueError(f"pre-activations {tuple(pre.shape)} and hidden {tuple(hidden.shape)} differ")
        first = self.n if start is None else start
        last = first + len(hidden_TF)
        for range_index, end in enumerate(self.edges or [last]):
            begin = self.edges[range_index - 1] if range_index else 0
            rows = slice(max(begin, first) - first, min(end, last) - first)
            if rows.start < rows.stop:
                self._count(hidden_TF[rows], None if pre_TF is None else pre_TF[rows], range_index)

    def _count(self, hidden_TF: Tensor, pre_TF: Tensor | None, range_index: int) -> None:
        abs_TF = hidden_TF.abs()
        largest_F = abs_TF.amax(0)
        largest = float(largest_F.max())
        if not math.isfinite(largest):
            raise ValueError("hidden vectors are not finite")
        torch.maximum(self.max_abs[range_index], largest_F, out=self.max_abs[range_index])
        # Sums over tokens as products with a vector of ones: several times faster than `sum` on a CPU.
        ones_T = torch.ones(len(abs_TF), device=self.device)
        abs64_TF = abs_TF.double()
        self.sum_abs += ones_T.double() @ abs64_TF
        self.sum_squares[range_index] += ones_T.double() @ abs64_TF.square_()
        self.zeros += len(abs_TF) - (ones_T @ abs_TF.sign()).long()
        if pre_TF is not None:
            pre_F = pre_TF.amax(0)
            torch.maximum(self.max_pre[range_index], pre_F, out=self.max_pre[range_index])
        self.n += len(hidden_TF)
        if self._top:
            self._place_window()
            self._count_small(abs_TF)
        else:
            self._waiting.append(abs_TF)
            if self.n >= _FIRST:
                self._flush()

    def _flush(self) -> None:
        """Place the window and count what has waited for it. While all entries are zero there is none to place."""
        self._place_window()
        for abs_TF in self._waiting if self._top else []:
            self._count_small(abs_TF)
        self._waiting.clear()

    def _place_window(self) -> None:
        rms = math.sqrt(float(self.sum_squares.sum()) / (max(self.n, 1) * self.d_ff))
        if rms > 0:
            self._raise_top(_grid_index(_HEADROOM * REL * rms) + 1)

    def _count_small(self, abs_TF: Tensor) -> None:
        # A comparison that writes floats is faster than one that writes bools. Zeros are counted elsewhere.
        small_TF = torch.lt(abs_TF, _grid_value(self._top), out=torch.empty_like(abs_TF)).mul_(abs_TF)
        where = small_TF.view(-1).nonzero().squeeze(1)
        cell = (small_TF.view(-1)[where].view(torch.int32) >> _DROPPED_BITS) - (self._top - _WINDOW)
        index = where % self.d_ff * _WINDOW + cell.clamp_(min=0)  # cell 0 also holds all that is smaller
        self._small.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def _raise_top(self, top: int) -> None:
        """Move the window up; what leaves it at the lower end is still counted, in cell 0."""
        shift = min(top - self._top, _WINDOW) if self._top else 0
        if shift > 0:
            moved = torch.zeros_like(self._small)
            moved[:, : _WINDOW - shift] = self._small[:, shift:]
            moved[:, 0] += self._small[:, :shift].sum(1, dtype=torch.int32)
            self._small = moved
        self._top = max(top, self._top)
        self._lowest_top = self._lowest_top or top

    def merge(self, other: NeuronAccumulator) -> None:
        """Add what another accumulator (other tokens, same layer, same N) has counted."""
        self._flush()
        other._flush()
        if (other.d_ff, other.n_tokens) != (self.d_ff, self.n_tokens):
            raise ValueError("only accumulators of the same width and N can be merged")
        top = max(self._top, other._top)
        if top:
            other_small = NeuronAccumulator(self.d_ff)
            other_small._small, other_small._top = other._small.to(self.device), other._top
            other_small._raise_top(top)
            self._raise_top(top)
            self._small += other_small._small
            self._lowest_top = min(other._lowest_top or top, self._lowest_top)
        for name in ("max_abs", "max_pre"):
            mine = getattr(self, name)
            torch.maximum(mine, getattr(other, name).to(self.device), out=mine)
        for name in ("sum_squares", "sum_abs", "zeros"):
            getattr(self, name).add_(getattr(other, name).to(self.device))
        self.n += other.n

    def all_reduce(self) -> None:
        """`merge` over the processes of `torch.distributed`: afterwards all hold the whole."""
        self._flush()
        n = torch.tensor([self.n], device=self.device)
        dist.all_reduce(n, dist.ReduceOp.SUM)
        top = torch.tensor([self._top], device=self.device)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        lowest = torch.tensor([self._lowest_top or int(top)], device=self.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        if int(top):
            self._raise_top(int(top))
            self._lowest_top = int(lowest)
        for tensor in (self.max_abs, self.max_pre):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        for tensor in (self.sum_squares, self.sum_abs, self.zeros, self._small):
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        self.n = int(n)

    def columns(
        self,
        column_norm: Tensor | None = None,
        exact_zero: bool = False,
        gradient: Tensor | None = None,
    ) -> Columns:
        """Return the per-neuron table: one array of length `d_ff` per column, see `figures.COLUMNS`.

        `column_norm`: norm of each neuron's column in `down`. `exact_zero`: whether this block's hidden
        can be exactly zero on a half line. `gradient`: mean norm of each neuron's incoming gradient.
        """
        self._flush()
        n = max(self.n, 1)
        mean_square = (self.sum_squares.sum(0) / n).cpu().numpy()
        rms = math.sqrt(mean_square.mean())
        below, threshold = self._below(REL * rms)
        missing = np.full(self.d_ff, np.nan)
        columns: Columns = {
            "n": np.full(self.d_ff, self.n),
            "neuron": np.arange(self.d_ff),
            "max_abs": self.max_abs.amax(0).double().cpu().numpy(),
            "mean_abs": (self.sum_abs / n).cpu().numpy(),
            "mean_square": mean_square,
            "zeros": self.zeros.cpu().numpy(),
            "below": below,
            "below_threshold": np.full(self.d_ff, threshold),
            "max_pre": self._or_missing(self.max_pre.amax(0)),
            "column_norm": missing if column_norm is None else column_norm.double().cpu().numpy(),
            "gradient": missing if gradient is None else gradient.double().cpu().numpy(),
            "exact_zero": np.full(self.d_ff, exact_zero),
        }
        for name, ranges in (("n16", 1), ("n4", 2)):
            have = ranges < len(self.max_abs)
            tokens = self.edges[ranges - 1] if have else 1
            columns[f"max_abs_{name}"] = self.max_abs[:ranges].amax(0).double().cpu().numpy() if have else missing
            columns[f"mean_square_{name}"] = (
                (self.sum_squares[:ranges].sum(0) / tokens).cpu().numpy() if have else missing
            )
        return columns

    def result(
        self,
        column_norm: Tensor | None = None,
        exact_zero: bool = False,
        gradient: Tensor | None = None,
    ) -> dict[str, float]:
        """Return the layer's figures under the names of `docs/metrics.md`; arguments as in `columns`."""
        return layer_figures(self.columns(column_norm, exact_zero, gradient))

    def _below(self, threshold: float) -> tuple[np.ndarray, float]:
        """Entries per neuron below the grid value nearest to `threshold`, and that value.

        Missing (NaN) rather than wrong when the threshold left the window: that takes an RMS over all tokens
        4 times that of the first ones, or 250 times below it.
        """
        zeros = self.zeros.double().cpu().numpy()
        if not self._top:
            return zeros, threshold
        low = _grid_index(threshold)
        candidates = (_grid_value(low), _grid_value(low + 1))
        nearest = low + int(candidates[1] - threshold < threshold - candidates[0])
        cells = nearest - (self._top - _WINDOW)
        if cells < 1 or nearest > self._lowest_top:
            return np.full(self.d_ff, np.nan), _grid_value(nearest)
        return zeros + self._small[:, :cells].sum(1).cpu().numpy(), _grid_value(nearest)

    @staticmethod
    def _or_missing(values: Tensor) -> np.ndarray:
        array = values.double().cpu().numpy()
        return np.where(np.isneginf(array), np.nan, array)
