"""How the report's charts look: colours for light and dark, the PNG, and the script that draws them on the page."""

import copy
from typing import Any

from ffnlab.study.statistics import BETTER, NOT_RESOLVED, TOO_FEW, WORSE

Spec = dict[str, Any]

# The first colour is the baseline's. Each has a contrast of 3:1 or more against its ground.
PALETTES = {
    "light": [
        "#5b6470",
        "#1f6fd6",
        "#c8501a",
        "#0f8a5f",
        "#a8329a",
        "#8a6a00",
        "#0b829e",
        "#c42f4b",
        "#6650c9",
        "#4d7c0f",
        "#9a4f2f",
    ],
    "dark": [
        "#a7b0bd",
        "#6ea8ff",
        "#ff9461",
        "#45c795",
        "#e07fd3",
        "#d9b441",
        "#4cc3dd",
        "#ff7f92",
        "#a99bff",
        "#9ccc54",
        "#d99a79",
    ],
}
VERDICTS = {BETTER: "#16915a", WORSE: "#d2445a", NOT_RESOLVED: "#808894", TOO_FEW: "#808894"}
RAMPS = {"light": ["#f1f4f8", "#9fc3ee", "#3f7fd0", "#123c7c"], "dark": ["#1d222b", "#27528f", "#5b9bea", "#d8e9ff"]}
INK = {"light": ("#1d232b", "#5b6470", "#e3e7ec", "#ffffff"), "dark": ("#e8ebef", "#a7b0bd", "#2c333d", "#14181d")}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def theme(scheme: str, legend: bool) -> Spec:
    """Vega-Lite configuration for ``light`` or ``dark``; the page has a legend of its own."""
    ink, muted, grid, ground = INK[scheme]
    return {
        "background": ground,
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted, "titleColor": muted, "gridColor": grid, "domainColor": grid, "tickColor": grid,
            "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8, "labelLimit": 150,
        },
        "axisY": {"labelColor": ink},
        "title": {"color": ink, "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 10},
        "legend": {
            "disable": not legend, "labelColor": ink, "titleColor": muted, "titleFontWeight": "normal",
            "orient": "bottom", "columns": 5, "symbolOpacity": 1, "labelLimit": 220, "gradientLength": 160,
        },
        "range": {"category": PALETTES[scheme], "heatmap": RAMPS[scheme], "ramp": RAMPS[scheme]},
        "line": {"strokeWidth": 2},
        "text": {"color": ink},
        "rule": {"color": muted},
    }  # fmt: skip


def png(spec: Spec, width: int = 640) -> bytes:
    """The chart as a light PNG at twice the resolution."""
    import vl_convert

    fixed = copy.deepcopy(spec) | {"width": width, "config": theme("light", legend=True), "padding": 16}
    return bytes(vl_convert.vegalite_to_png(fixed, scale=2))


def without_legend(spec: Spec) -> Spec:
    """For the page, which has legends and captions of its own."""
    spec = copy.deepcopy(spec)
    if "color" in spec.get("encoding", {}):
        spec["encoding"]["color"]["legend"] = None
    return spec


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, as vl-convert carries them: the page needs no network."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
