"""The census at a glance: layers down, training steps across, `dead/rel` as colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

_WRITE_IN_CELLS = 160  # up to so many cells hold their figure as text


def draw(steps: Sequence[int], rates: Sequence[Sequence[float]], n: int, path: Path, title: str = "") -> None:
    """Write the picture.

    Args:
        steps: optimiser steps of the censuses.
        rates: per census the `dead/rel` of every layer, in [0, 1].
        n: tokens counted in each.
        path: a PNG file.
        title: what was trained.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    rate_LS = np.array(rates, dtype=float).T
    n_layers, n_steps = rate_LS.shape
    figure = Figure(
        figsize=(min(max(0.62 * n_steps + 2.4, 6.4), 14), min(0.42 * n_layers + 1.9, 8)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # A square-root scale over the whole range [0, 1]: pictures of different runs share their colours, and a
    # few percent can still be told from none.
    image = axes.imshow(rate_LS, aspect="auto", cmap="magma_r", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    axes.set_yticks(range(n_layers), [f"L{layer}" for layer in range(n_layers)])
    shown = np.unique(np.linspace(0, n_steps - 1, min(n_steps, 11)).round().astype(int))
    axes.set_xticks(shown, [f"{steps[index]:,}" for index in shown])
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("layer")
    subtitle = f"dead/rel: neurons silent on {n:,} validation tokens, in %"
    written = rate_LS.size <= _WRITE_IN_CELLS
    axes.set_title(subtitle, loc="left", fontsize=9, color="#444444")
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    axes.set_xticks(np.arange(n_steps + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(n_layers + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1 if written else 0.3)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if written:
        for (layer, index), rate in np.ndenumerate(rate_LS):
            colour = "white" if rate > 0.15 else "#333333"
            axes.text(index, layer, _percent(rate), ha="center", va="center", fontsize=8, color=colour)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.05, 0.25, 0.5, 1], pad=0.015, fraction=0.05, aspect=22)
    bar.ax.set_yticklabels(["0%", "5%", "25%", "50%", "100%"])
    bar.outline.set_visible(False)
    bar.set_label("dead neurons")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=160)
    temporary.replace(path)


def _percent(rate: float) -> str:
    if rate == 0:
        return "0"
    return f"{100 * rate:.1f}" if rate < 0.0995 else f"{100 * rate:.0f}"
