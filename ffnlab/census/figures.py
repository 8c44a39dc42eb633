"""The definitions: from a per-neuron table to the figures that are logged.

A table is a dict of equally long NumPy arrays, one entry per neuron; the columns are listed in `COLUMNS`.
Nothing here looks at a model, so every logged figure can be recomputed from the parquet file alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Columns = dict[str, np.ndarray]

REL = 1e-3  # "relatively dead": a thousandth of the layer's RMS
TAU = 0.025  # tau-dormant, Sokar et al. 2023 (arXiv 2302.12902)

COLUMNS = {
    "step": "optimiser steps taken when the census was made",
    "final": "true for the census at the end of training (larger N)",
    "layer": "0 is the first",
    "neuron": "input feature of `down`, 0 is the first",
    "n": "tokens counted",
    "max_abs": "largest |hidden| over the tokens",
    "mean_abs": "mean |hidden|",
    "mean_square": "mean hidden^2",
    "zeros": "tokens on which hidden is exactly zero",
    "below": "tokens on which |hidden| < below_threshold",
    "below_threshold": "the grid value nearest to 1e-3 of the layer's RMS",
    "max_pre": "largest pre-activation (missing: the block has none)",
    "column_norm": "norm of the neuron's column in `down`",
    "gradient": "mean norm of the gradient of the incoming weights over M batches (missing: not measured)",
    "exact_zero": "whether this block's activation is exactly zero on a half line",
    "max_abs_n16": "max_abs over the first N/16 tokens",
    "mean_square_n16": "mean_square over the first N/16 tokens",
    "max_abs_n4": "max_abs over the first N/4 tokens",
    "mean_square_n4": "mean_square over the first N/4 tokens",
}


def relatively_dead(max_abs: np.ndarray, mean_square: np.ndarray) -> np.ndarray:
    """Which neurons never exceed 1e-3 of the layer's RMS, `(d_ff,)` bool."""
    return max_abs <= REL * math.sqrt(mean_square.mean())


def layer_figures(columns: Columns) -> dict[str, float]:
    """Figures of one layer. A figure that is not defined for it is absent, never 0."""
    n, d_ff = int(columns["n"][0]), len(columns["n"])
    figures: dict[str, float] = {}
    if n == 0:
        return figures
    figures["dead/rel"] = _share(relatively_dead(columns["max_abs"], columns["mean_square"]))
    for at in ("n16", "n4"):
        if not np.isnan(columns[f"max_abs_{at}"]).any():
            dead = relatively_dead(columns[f"max_abs_{at}"], columns[f"mean_square_{at}"])
            figures[f"dead/rel_{at}"] = _share(dead)
    if columns["exact_zero"][0]:
        figures["dead/exact"] = _share(columns["max_abs"] == 0)
    norms = columns["column_norm"]
    if not np.isnan(norms).any() and norms.any():
        rms = math.sqrt((columns["mean_square"] * norms**2).mean())
        figures["dead/contrib"] = _share(columns["max_abs"] * norms <= REL * rms)
    gradient = columns["gradient"]
    if not np.isnan(gradient).any() and gradient.any():
        figures["dead/gradient"] = _share(gradient <= REL * gradient.mean())
    if not np.isnan(columns["max_pre"]).any():
        figures["gate/never_open"] = _share(columns["max_pre"] <= 0)
    figures["dormant/rate"] = _share(columns["mean_abs"] <= TAU * columns["mean_abs"].mean())
    figures["sparsity/zero"] = float(columns["zeros"].sum()) / (n * d_ff)
    if not np.isnan(columns["below"]).any():
        figures["sparsity/rel"] = float(columns["below"].sum()) / (n * d_ff)
    return figures


def with_mean(layers: Iterable[dict[str, float]]) -> dict[str, float]:
    """Join layers: `dead/rel_L0`, ... and the mean `dead/rel` over the layers that have the figure."""
    named: dict[str, float] = {}
    values: dict[str, list[float]] = {}
    for index, figures in enumerate(layers):
        for name, value in figures.items():
            named[f"{name}_L{index}"] = value
            values.setdefault(name, []).append(value)
    return {name: sum(items) / len(items) for name, items in values.items()} | named


def split_layers(table: Columns) -> list[Columns]:
    """Split the table of one census by its `layer` column, in order."""
    return [
        {name: column[table["layer"] == layer] for name, column in table.items()} for layer in np.unique(table["layer"])
    ]


def figures(table: Columns) -> dict[str, float]:
    """All figures of one census, per layer and as a mean, and `census/n`."""
    layers = split_layers(table)
    return with_mean(layer_figures(layer) for layer in layers) | {"census/n": float(table["n"][0])}


def changes(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[str, float]:
    """Shares of neurons that came alive (`dead/revived`) or died (`dead/newly_dead`) between two censuses.

    Both are the `relatively_dead` neurons per layer, counted on the same N tokens.
    """
    pairs = zip(before, after, strict=True)
    return with_mean({"dead/revived": _share(was & ~now), "dead/newly_dead": _share(now & ~was)} for was, now in pairs)


def _share(mask: np.ndarray) -> float:
    return float(mask.mean())
