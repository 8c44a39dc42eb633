"""The census of one moment as a table for people: one line a layer, the curve over N first."""

from __future__ import annotations

import math

from rich.table import Table

from ffnlab.census.figures import layer_figures, split_layers, with_mean
from ffnlab.census.measure import Census

_SHOWN = (
    ("dead/rel_n16", "N/16"),
    ("dead/rel_n4", "N/4"),
    ("dead/rel", "N"),
    ("dead/exact", "dead\nexact"),
    ("dead/contrib", "dead\ncontrib"),
    ("dead/gradient", "dead\ngradient"),
    ("gate/never_open", "gate\nnever open"),
    ("dormant/rate", "dormant"),
    ("sparsity/zero", "sparsity\nzero"),
    ("sparsity/rel", "sparsity\nrel"),
)


def layer_table(result: Census, title: str = "") -> Table:
    """Build the table; a dash stands for a figure that is not defined for the block."""
    layers = [layer_figures(layer) for layer in split_layers(result.table)]
    mean = with_mean(layers)
    n = result.n
    note = (
        f"N = {n:,} tokens (N/4 = {math.ceil(n / 4):,}, N/16 = {math.ceil(n / 16):,}). "
        f"A neuron silent on N tokens fires on fewer than {3 / n:.1e} of tokens (95%)."
    )
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    table.add_column("layer")
    table.add_column("neurons", justify="right")
    for index, (name, heading) in enumerate(_SHOWN):
        if name in mean:
            table.add_column(f"dead/rel\n{heading}" if index < 3 else heading, justify="right")
    names = [name for name, _ in _SHOWN if name in mean]
    for index, (layer, figures) in enumerate(zip(split_layers(result.table), layers, strict=True)):
        cells = [_percent(figures.get(name)) for name in names]
        table.add_row(f"L{index}", str(len(layer["neuron"])), *cells, end_section=index == len(layers) - 1)
    table.add_row("mean", "", *(_percent(mean[name]) for name in names))
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}%"
