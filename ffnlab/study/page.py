"""What one study's report shows: its figures in groups, each with its caption, in the order of the page."""

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffnlab.study import chart_theme, charts, loss_chart, words
from ffnlab.study.answer import Analysis, Arm

if TYPE_CHECKING:
    import pandas as pd

TERMS = {
    "dead/exact": "share of neurons that are exactly 0 on all tokens",
    "dead/rel": "share of neurons that never exceed a thousandth of their layer's RMS: the one to compare blocks by",
    "dead/contrib": "as dead/rel, for what a neuron adds through its column of down",
    "dead/gradient": "share of neurons whose weights get less than a thousandth of their layer's mean gradient",
    "dead/revived": "share of neurons that were dead at the census before and are not now",
    "dead/newly_dead": "share of neurons that are dead and were not at the census before",
    "gate/never_open": "share of neurons whose pre-activation is never above 0",
    "dormant/rate": "share of neurons whose mean size is at most 2.5% of their layer's mean",
    "sparsity/zero": "share of single values, neuron by token, that are exactly 0",
    "sparsity/rel": "share of single values below a thousandth of the layer's RMS",
    "census/n": "tokens that the census looked at",
}
CHARTS = "charts"  # the folder of PNGs beside the report
GROUPS = ("differences", "noise", "rates", "other", "curves", "dead", "profiles")


@dataclass(frozen=True)
class Figure:
    """One chart on the page and its PNG."""

    key: str
    title: str
    caption: str
    spec: chart_theme.Spec

    @property
    def file(self) -> str:
        """Path of the PNG, relative to the report."""
        return f"{CHARTS}/{self.key}.png"


@dataclass(frozen=True)
class Page:
    """One study with everything its report shows."""

    key: str
    analysis: Analysis
    groups: dict[str, list[Figure]]
    never_dead: list[str]  # arms without a dead neuron at any census
    flat_profiles: list[str]  # census figures that are zero everywhere
    way_tokens: str = ""  # that each census on the way looked at; they feed the heat maps, the final one all else


def page(analysis: Analysis, curves: "pd.DataFrame", prefix: str = "") -> Page:
    """All figures of one study, in groups, in the order of the page."""
    key = f"{prefix}-" if prefix else ""
    groups: dict[str, list[Figure]] = {group: [] for group in GROUPS}

    def add(group: str, name: str, title: str, caption: str, spec: chart_theme.Spec | None) -> None:
        if spec is not None:
            groups[group].append(Figure(key + _slug(name), title, caption, spec))

    add(
        "differences", "forest", "Difference to the baseline",
        "Thick: the 95% interval of one block by itself. Thin: simultaneous 95% intervals over all blocks; where a "
        "thin one stays clear of zero, the verdict is better or worse.",
        charts.forest(analysis),
    )  # fmt: skip
    seeds = f"One point a run, the bar is the mean. {words.outlying(analysis)}".strip()
    add("differences", "seeds", "Every seed", seeds, charts.seed_points(analysis))
    add(
        "rates",
        "rates",
        "Loss by learning rate",
        "Filled points and the line: tuning seeds. Hollow: fresh seeds.",
        charts.rate_curves(analysis),
    )
    if analysis.noise is not None:
        grid = analysis.noise.grid.to_numpy()
        span = f"from {words.number(grid.min())} to {words.number(grid.max())}"
        caption = f"One run a field: the stronger the colour, the higher the loss, {span}."
        add("noise", "grid", "Loss by init seed and data seed", caption, charts.noise_grid(analysis))
    add(
        "other",
        "forest-other",
        "The other analysis, exploratory",
        "It was not declared as primary; no verdict rests on it.",
        charts.forest(analysis, 1),
    )
    for axis, label in loss_chart.AXES.items():
        caption = words.WALL_CLOCK if axis == "seconds" else ""
        add("curves", f"loss-{axis}", f"Against {label}", caption, loss_chart.loss_curves(analysis, curves, axis))
    maps = charts.dead_maps(analysis, curves)
    for arm, spec in maps.items():
        if spec is None:
            continue
        top = spec["encoding"]["color"]["scale"]["domain"][1]
        add("dead", f"dead-{arm}", words.plain(arm), f"Full colour is {words.percent(top)}.", spec)
    flat = []
    for metric, spec in charts.profiles(analysis).items():
        add("profiles", f"profile-{metric}", metric, "", spec)
        if spec is None:
            flat.append(metric)
    taken: set[str] = set()
    for figures in groups.values():
        for i, figure in enumerate(figures):
            name, n = figure.key, 2
            while name in taken:  # two names that differ only in what a file name cannot hold
                name, n = f"{figure.key}-{n}", n + 1
            taken.add(name)
            figures[i] = dataclasses.replace(figure, key=name)
    never_dead = [words.plain(arm) for arm, spec in maps.items() if spec is None]
    return Page(prefix or "study", analysis, groups, never_dead, flat, _sizes(curves))


def _sizes(curves: "pd.DataFrame") -> str:
    """``8,192``, or ``4,096 to 8,192`` where censuses on the way differ; empty where they did not log it."""
    sizes = curves.loc[(curves["metric"] == "census/n") & (curves["layer"] == -1), "value"]
    return " to ".join(dict.fromkeys(f"{size:,.0f}" for size in (sizes.min(), sizes.max()))) if len(sizes) else ""


def figure(arm: Arm, name: str) -> str:
    """A census figure of the table: the mean over layers and seeds."""
    if name.startswith("census/"):
        return f"{arm.figures[name]:,.0f}" if name in arm.figures else words.NONE
    return words.percent(arm.figures.get(name), 2)


def figure_range(arm: Arm, name: str) -> str:
    """``0.00 to 37.90``, the lowest and the highest seed in percent; empty where they show no difference."""
    low, high = (f"{100 * value:.2f}" for value in arm.ranges.get(name, (0.0, 0.0)))
    return "" if low == high or name.startswith("census/") else f"{low} to {high}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "chart"
