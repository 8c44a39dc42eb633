"""The census of one moment as a table for people: one line a layer, the curve over N first."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from ffnlab.census.figures import layer_figures, split_layers, with_mean
from ffnlab.census.measure import Census

_SHOWN = (
    ("dead/rel_n16", "dead\nrel\nN/16"),
    ("dead/rel_n4", "dead\nrel\nN/4"),
    ("dead/rel", "dead\nrel\nN"),
    ("dead/exact", "dead\nexact"),
    ("dead/contrib", "dead\ncontrib"),
    ("dead/gradient", "dead\ngrad."),
    ("gate/never_open", "gate\nnever\nopen"),
    ("dormant/rate", "dormant"),
    ("sparsity/zero", "spars.\nzero"),
    ("sparsity/rel", "spars.\nrel"),
)


def layer_table(result: Census, title: str = "") -> Table:
    """Build the table, in percent and 80 characters wide; what is not defined for the block has no column."""
    layers = [layer_figures(layer) for layer in split_layers(result.table)]
    mean = with_mean(layers)
    n = result.n
    note = (
        f"In %. N = {n:,} tokens (N/4 = {math.ceil(n / 4):,}, N/16 = {math.ceil(n / 16):,}).\n"
        f"Silent on N tokens: fires on fewer than {3 / n:.1e} of tokens (95%).\n"
        "docs/metrics.md says what the columns mean."
    )
    table = Table(
        title=title,
        caption=note,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("layer")
    table.add_column("d_ff", justify="right")
    for name, heading in _SHOWN:
        if name in mean:
            table.add_column(heading, justify="right")
    names = [name for name, _ in _SHOWN if name in mean]
    for index, (layer, figures) in enumerate(zip(split_layers(result.table), layers, strict=True)):
        cells = [_percent(figures.get(name)) for name in names]
        table.add_row(f"L{index}", str(len(layer["neuron"])), *cells, end_section=index == len(layers) - 1)
    table.add_row("mean", "", *(_percent(mean[name]) for name in names))
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"
