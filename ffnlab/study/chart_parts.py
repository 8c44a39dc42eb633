"""What the report's charts have in common: colours by block, rows that are JSON, the frame, and blocks that step back.

Names from configurations enter as data values alone, never as field names or Vega expressions: no name can run code.
"""

import math
from typing import TYPE_CHECKING, Any

import altair as alt

from ffnlab.study.answer import Analysis
from ffnlab.study.chart_theme import Spec
from ffnlab.study.words import plain

if TYPE_CHECKING:
    import pandas as pd

ZERO = "datum.value === 0 ? '0' : datum.label"


def names(analysis: Analysis) -> list[str]:
    """Arms in the order of their colours: the baseline, then as the study lists them."""
    base = analysis.study.baseline
    return [plain(arm) for arm in (base, *(a for a in analysis.study.arms if a != base))]


def block_color(analysis: Analysis) -> alt.Color:
    """A colour a block, the same in every chart."""
    return alt.Color("arm:N", title=None, scale=alt.Scale(domain=names(analysis)))


def inline(rows: list[dict[str, Any]]) -> alt.InlineData:
    """Rows inside the chart; numpy scalars and NaN are no JSON."""
    rows = [{k: v.item() if hasattr(v, "item") else v for k, v in row.items()} for row in rows]
    clean = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    return alt.InlineData(values=clean)


def records(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """A table as rows."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def pick() -> alt.Parameter:
    """The block that the page's legend brings forward; empty: all of them."""
    return alt.param(name="pick", value="")


def faded(full: float = 1.0, faint: float = 0.12) -> Any:
    """Opacity: `full` for the picked block, `faint` for the others."""
    return alt.condition("pick === '' || datum.arm === pick", alt.value(full), alt.value(faint))


def spec_of(chart: Any, height: int | Spec) -> Spec:
    """The chart as wide as the page, without colours of its own, so that the page can draw it light or dark."""
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    spec.pop("config", None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def rows_height(n: int) -> int:
    """Pixels for `n` rows."""
    return max(90, 34 * n + 24)
