"""The loss curves of a study, over steps, tokens, FLOPs or time."""

from typing import TYPE_CHECKING

import altair as alt

from ffnlab.study.answer import Analysis
from ffnlab.study.chart_parts import ZERO, block_color, faded, inline, pick, records, spec_of
from ffnlab.study.chart_theme import Spec
from ffnlab.study.words import plain

if TYPE_CHECKING:
    import pandas as pd

LEFT_OUT = 0.25  # share of training that loss curves leave out
FEW = 3  # validations that a curve must have after that
AXES = {"step": "steps", "tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds"}


def _points(analysis: Analysis, curves: "pd.DataFrame") -> "pd.DataFrame":
    """Validation losses with their cell's status, and a finished cell's final loss where no validation met its end."""
    import pandas as pd

    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    found = curves[(curves["metric"] == "val/loss") & (curves["layer"] == -1)]
    reached = found.groupby("cell")["step"].max().to_dict()
    done = cells[cells["status"] == "finished"]
    early = [cell for cell, steps in zip(done["cell"], done["steps"], strict=True) if steps > reached.get(cell, -1)]
    ends = done[done["cell"].isin(early)]
    ends = ends.assign(step=ends["steps"], value=ends["loss"], flops=ends["flops"] * ends["tokens"])
    columns = ["cell", "arm", "step", "tokens", "seconds", "flops", "value"]
    points = pd.concat([part[columns] for part in (found, ends) if not part.empty] or [found[columns]])
    points = points[points["cell"].isin(cells["cell"])]
    status = dict(zip(cells["cell"], cells["status"], strict=True))
    return points.assign(arm=points["arm"].map(plain), status=points["cell"].map(status))


def loss_curves(analysis: Analysis, curves: "pd.DataFrame", axis: str) -> Spec | None:
    """Validation loss against ``axis`` (a key of `AXES`): the mean over finished cells, a band over all their seeds.

    Cells that did not finish are dashed lines of their own: averaging them would bend the mean where they stop.
    """
    points = _points(analysis, curves)
    points = points[points[axis].notna()]
    done = points[points["status"] == "finished"]
    broken = points[points["status"] != "finished"]
    if done.empty:
        return None
    # The first steps fall from ln(vocabulary): they would flatten everything that the study is about. Left out of the
    # data, as clipping them makes the PNG ten times as slow. Where that would leave hardly a line, all is drawn.
    late = done[done["step"] >= LEFT_OUT * done["step"].max()]
    done = late if late["step"].nunique() >= FEW else done
    band = done.groupby(["arm", "step"], sort=False).agg(
        x=(axis, "mean"), mean=("value", "mean"), low=("value", "min"), high=("value", "max"), seeds=("value", "size")
    )
    rows = records(band.reset_index())
    bottom, top = float(done["value"].min()), float(done["value"].max())
    pad = 0.03 * (top - bottom) or 0.01
    broken = broken[(broken["step"] >= done["step"].min()) & broken["value"].between(bottom - pad, top + pad)]
    x = alt.X(
        "x:Q",
        title=AXES[axis],
        scale=alt.Scale(zero=False),  # the first quarter is left out, as a rule
        axis=alt.Axis(format="~s", labelExpr=ZERO, tickCount=5, grid=False),
    )
    y_scale = alt.Scale(domain=[bottom - pad, top + pad], zero=False, nice=False)
    base = alt.Chart(inline(rows))
    layers = [
        base.mark_area().encode(
            x=x,
            y=alt.Y("low:Q", title="validation loss (nats per token)", scale=y_scale),
            y2="high:Q",
            color=block_color(analysis),
            fillOpacity=faded(0.1, 0.02),
        ),
        base.mark_line().encode(
            x=x, y=alt.Y("mean:Q", scale=y_scale), color=block_color(analysis), strokeOpacity=faded()
        ),
        base.mark_point(filled=True, size=26).encode(
            x=x,
            y=alt.Y("mean:Q", scale=y_scale),
            color=block_color(analysis),
            fillOpacity=faded(),
            strokeOpacity=alt.value(0),
            tooltip=[
                alt.Tooltip("arm:N", title="block"),
                alt.Tooltip("step:Q"),
                alt.Tooltip("x:Q", title=AXES[axis], format=".4s"),
                alt.Tooltip("mean:Q", title="mean loss", format=".4f"),
                alt.Tooltip("low:Q", title="lowest seed", format=".4f"),
                alt.Tooltip("high:Q", title="highest seed", format=".4f"),
                alt.Tooltip("seeds:Q"),
            ],
        ),
    ]
    # What the frequencies of single tokens give; runs that learned are far below it, and their charts not stretched.
    unigram = analysis.study.cells["unigram"].dropna().unique()
    near = [{"mean": float(value)} for value in unigram if bottom - pad <= value <= top + pad]
    if near:
        rule = alt.Chart(inline(near)).encode(y=alt.Y("mean:Q", scale=y_scale))
        layers.append(rule.mark_rule(strokeDash=[2, 3]))
        layers.append(rule.mark_text(text="unigram model", align="left", dx=4, dy=-7, x=0))
    if not broken.empty:
        lines = broken.assign(x=broken[axis], mean=broken["value"])[["arm", "cell", "x", "mean", "status"]]
        layers.append(
            alt.Chart(inline(records(lines)))
            .mark_line(strokeDash=[4, 3], strokeWidth=1.5)
            .encode(
                x=x,
                y=alt.Y("mean:Q", scale=y_scale),
                color=block_color(analysis),
                detail="cell:N",
                strokeOpacity=faded(),
                tooltip=["cell:N", "status:N", alt.Tooltip("mean:Q", format=".4f")],
            )
        )
    return spec_of(alt.layer(*layers).add_params(pick()), 270)
