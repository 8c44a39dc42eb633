"""The report's pictures: altair charts without a theme, so that the page can draw them light or dark.

Every chart has a parameter ``pick``: the page's legend sets it to bring one block forward.
"""

import math
import re
from typing import TYPE_CHECKING

import altair as alt

from ffnlab.study.answer import Analysis
from ffnlab.study.chart_parts import ZERO, block_color, faded, inline, names, pick, records, rows_height, spec_of
from ffnlab.study.chart_theme import VERDICTS, Spec
from ffnlab.study.statistics import BETTER, NOT_RESOLVED, WORSE
from ffnlab.study.words import plain

if TYPE_CHECKING:
    import pandas as pd

STEP_ASIDE, WIDEST = 0.1, 0.5  # in layers: between two blocks of a profile, and from the first to the last
VARIANT = re.compile(r"_n\d+$")


def forest(analysis: Analysis, which: int = 0) -> Spec | None:
    """Differences to the baseline; ``which`` is 0 for the declared analysis and 1 for the other."""
    rows = []
    for arm in analysis.arms:
        if len(arm.answers) > which and not math.isnan(arm.answers[which].difference):
            a = arm.answers[which]
            rows.append(
                {
                    "arm": plain(arm.name), "difference": a.difference, "low": a.low, "high": a.high,
                    "wide_low": a.wide_low,
                    "wide_high": a.wide_high, "verdict": a.verdict, "p": a.p_adjusted, "n": a.n,
                }
            )  # fmt: skip
    if not rows:
        return None
    shown = {verdict: VERDICTS[verdict] for verdict in (BETTER, WORSE, NOT_RESOLVED)}
    color = alt.Color("verdict:N", title=None, scale=alt.Scale(domain=list(shown), range=list(shown.values())))
    y = alt.Y(
        "arm:N", sort=[str(r["arm"]) for r in rows], title=None, axis=alt.Axis(grid=False, ticks=False, domain=False)
    )
    x_title = f"loss minus {plain(analysis.study.baseline)}'s (nats per token; left is better)"
    base = alt.Chart(inline(rows))
    tip = [
        alt.Tooltip("arm:N", title="block"),
        alt.Tooltip("difference:Q", format="+.4f"),
        alt.Tooltip("low:Q", title="95% from", format="+.4f"),
        alt.Tooltip("high:Q", title="95% to", format="+.4f"),
        alt.Tooltip("wide_low:Q", title="simultaneous from", format="+.4f"),
        alt.Tooltip("wide_high:Q", title="simultaneous to", format="+.4f"),
        alt.Tooltip("p:Q", title="p (Holm)", format=".4f"),
        alt.Tooltip("n:Q", title="seeds"),
        alt.Tooltip("verdict:N"),
    ]
    zero = alt.Chart(alt.InlineData(values=[{"x": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="x:Q")
    x = alt.X("wide_low:Q", title=x_title, axis=alt.Axis(format="+.2~f", labelExpr=ZERO, tickCount=5))
    base = base.encode(y=y, color=color, tooltip=tip)
    wide = base.mark_rule(strokeWidth=1.2).encode(x=x, x2="wide_high:Q")
    thick = base.mark_rule(strokeWidth=5, strokeCap="round", strokeOpacity=0.45).encode(x="low:Q", x2="high:Q")
    point = base.mark_point(filled=True, size=80, opacity=1).encode(x="difference:Q")
    return spec_of(alt.layer(zero, wide, thick, point).add_params(pick()), rows_height(len(rows)))


def seed_points(analysis: Analysis) -> Spec | None:
    """Every seed's final loss, with each arm's mean as a bar."""
    order = [plain(arm.name) for arm in analysis.arms if arm.n]
    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    done = cells[cells["status"] == "finished"]
    columns = ["arm", "cell", "loss", "init_seed", "data_seed"]
    rows = [row | {"arm": plain(row["arm"])} for row in records(done[columns])]
    if not rows:
        return None
    means = [{"arm": plain(arm.name), "mean": arm.mean} for arm in analysis.arms if arm.n]
    y = alt.Y("arm:N", sort=order, title=None, axis=alt.Axis(grid=False, ticks=False, domain=False))
    title = "final validation loss (nats per token)"
    x = alt.X("loss:Q", title=title, scale=alt.Scale(zero=False, padding=10), axis=alt.Axis(tickCount=5))
    tip = [
        alt.Tooltip("cell:N"),
        alt.Tooltip("init_seed:Q", title="init seed"),
        alt.Tooltip("data_seed:Q", title="data seed"),
        alt.Tooltip("loss:Q", format=".4f"),
    ]
    points = (
        alt.Chart(inline(rows))
        .mark_point(filled=True, size=55)
        .encode(x=x, y=y, color=block_color(analysis), fillOpacity=faded(0.65), strokeOpacity=alt.value(0), tooltip=tip)
    )
    ticks = (
        alt.Chart(inline(means))
        .mark_tick(thickness=2, size=20)
        .encode(
            x="mean:Q",
            y=y,
            color=block_color(analysis),
            opacity=faded(),
            tooltip=["arm:N", alt.Tooltip("mean:Q", format=".4f")],
        )
    )
    return spec_of(alt.layer(points, ticks).add_params(pick()), rows_height(len(order)))


def dead_maps(analysis: Analysis, curves: "pd.DataFrame", metric: str = "dead/rel") -> dict[str, Spec | None]:
    """One heat map an arm: layers down, steps across, ``metric`` (mean over seeds) as colour, one scale for all.

    None for an arm that has the figure and is 0 everywhere: such a map shows nothing.
    """
    points = curves[(curves["metric"] == metric) & (curves["layer"] >= 0)]
    if analysis.compared is not None:
        points = points[points["cell"].isin(analysis.compared["cell"])]
    if points.empty:
        return {}
    by_step = points.groupby(["arm", "layer", "step"], sort=True)["value"]
    mean = by_step.agg(["mean", "size", "min", "max"]).reset_index()
    top = float(mean["mean"].max()) or 1.0
    maps: dict[str, Spec | None] = {}
    step_axis = alt.Axis(labelAngle=0, labelOverlap=True, format="~s", ticks=False, domain=False)
    legend = alt.Legend(format=".1%", gradientLength=160)
    for arm in analysis.arms:
        own = mean[mean["arm"] == arm.name]
        if own.empty:
            continue
        if not own["mean"].any():
            maps[arm.name] = None
            continue
        rows = [
            {"layer": int(r["layer"]), "step": int(r["step"]), "share": float(r["mean"]), "seeds": int(r["size"])}
            | {"low": float(r["min"]), "high": float(r["max"])}
            for r in own.to_dict("records")
        ]
        layers = sorted({row["layer"] for row in rows})
        chart = (
            alt.Chart(inline(rows))
            .mark_rect()
            .encode(
                x=alt.X("step:O", title="step", axis=step_axis),
                y=alt.Y("layer:O", title="layer", axis=alt.Axis(ticks=False, domain=False)),
                color=alt.Color("share:Q", title=metric, scale=alt.Scale(domain=[0, top]), legend=legend),
                tooltip=["layer:O", "step:O", *_share(metric, "share"), "seeds:Q"],
            )
        )
        maps[arm.name] = spec_of(chart, min(320, max(90, 24 * len(layers))))
    return maps


def profiles(analysis: Analysis) -> dict[str, Spec | None]:
    """One chart a census figure: its final value by layer, a line an arm. None for one that is 0 everywhere.

    Figures that differ from another in their number of tokens alone are left out.
    """
    metrics = sorted({metric for arm in analysis.arms for metric in arm.by_layer})
    shown = [metric for metric in metrics if not metric.startswith("census/") and not VARIANT.search(metric)]
    return {metric: _profile(analysis, metric) for metric in shown}


def _profile(analysis: Analysis, metric: str) -> Spec | None:
    arms = [arm for arm in analysis.arms if arm.by_layer.get(metric)]
    order = [name for name in names(analysis) if name in {plain(arm.name) for arm in arms}]
    arms.sort(key=lambda arm: order.index(plain(arm.name)))
    step = min(STEP_ASIDE, WIDEST / max(1, len(order)))
    rows = [
        # Blocks often agree, mostly at 0: side by side and dashed none is hidden by another.
        {"arm": plain(arm.name), "layer": layer, "value": value, "low": low, "high": high}
        | {"at": layer + step * (order.index(plain(arm.name)) - (len(order) - 1) / 2)}
        for arm in arms
        for layer, (value, (low, high)) in enumerate(zip(arm.by_layer[metric], arm.layer_ranges[metric], strict=True))
    ]
    if not any(row["high"] for row in rows):
        return None
    layers = list(range(max(len(arm.by_layer[metric]) for arm in arms)))
    ticks = alt.Axis(values=layers, format="d", labelOverlap=True, grid=False)
    base = alt.Chart(inline(rows)).encode(
        x=alt.X("at:Q", title="layer", axis=ticks, scale=alt.Scale(domain=[-0.5, layers[-1] + 0.5], nice=False)),
        y=alt.Y("value:Q", title=None, axis=alt.Axis(format="~%", tickCount=4)),
        color=block_color(analysis),
        opacity=faded(),
        tooltip=[alt.Tooltip("arm:N", title="block"), "layer:O", *_share(metric, "value")],
    )
    dash = alt.StrokeDash("arm:N", legend=None, scale=alt.Scale(domain=order, range=_dashes(len(order))))
    seeds = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q"), y2="high:Q")
    points = base.mark_point(filled=True, size=36)
    return spec_of(alt.layer(seeds, base.mark_line().encode(strokeDash=dash), points).add_params(pick()), 180)


def _dashes(n: int) -> list[list[int]]:
    """A dash pattern a line; the first, the baseline's, is whole and drawn below the others."""
    return [[1, 0], *([6, 4], [2, 4], [10, 4], [6, 3, 2, 3])[: max(0, n - 1)]] + [[6, 4]] * max(0, n - 5)


def _share(metric: str, value: str) -> list[alt.Tooltip]:
    """A share with the range over seeds."""
    ends = [alt.Tooltip(f"{end}:Q", title=f"{end}est seed", format=".2%") for end in ("low", "high")]
    return [alt.Tooltip(f"{value}:Q", title=metric, format=".2%"), *ends]


def rate_curves(analysis: Analysis) -> Spec | None:
    """Loss against learning rate: tuning seeds filled, fresh ones hollow, the tuning mean as a line."""
    cells = analysis.study.cells
    done = cells[(cells["status"] == "finished") & cells["lr"].notna()]
    if done.empty or not analysis.rates:
        return None
    tuning = set(analysis.tuning_seeds)
    done = done.assign(arm=done["arm"].map(plain), part=["tuning" if s in tuning else "fresh" for s in done["seed"]])
    rows = records(done[["arm", "lr", "loss", "seed", "part"]])
    means = done[done["part"] == "tuning"].groupby(["arm", "lr"])[["loss"]].mean().reset_index()
    rates = alt.Axis(format="~g", grid=False, values=sorted({row["lr"] for row in rows}))
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=12), axis=rates)
    y = alt.Y("loss:Q", title="final validation loss", scale=alt.Scale(zero=False))
    tip = [alt.Tooltip("arm:N"), alt.Tooltip("lr:Q", format="g"), alt.Tooltip("seed:Q"), alt.Tooltip("part:N")]
    tip.append(alt.Tooltip("loss:Q", format=".4f"))
    base = alt.Chart(inline(rows)).encode(x=x, y=y, color=block_color(analysis), opacity=faded(0.8), tooltip=tip)
    lines = (
        alt.Chart(inline(records(means)))
        .mark_line()
        .encode(x=x, y=y, color=block_color(analysis), strokeOpacity=faded())
    )
    tuned = base.transform_filter("datum.part === 'tuning'").mark_point(filled=True, size=45)
    fresh = base.transform_filter("datum.part === 'fresh'").mark_point(filled=False, size=45)
    return spec_of(alt.layer(lines, fresh, tuned).add_params(pick()), 300)


def noise_grid(analysis: Analysis) -> Spec | None:
    """The crossed grid: init seeds down, data seeds across, loss as colour."""
    if analysis.noise is None:
        return None
    rows = [
        {"init": init, "data": data, "loss": float(loss)}
        for init, row in zip(analysis.noise.grid.index, analysis.noise.grid.to_numpy(), strict=True)
        for data, loss in zip(analysis.noise.grid.columns, row, strict=True)
    ]
    chart = (
        alt.Chart(inline(rows))
        .mark_rect()
        .encode(
            x=alt.X("data:O", title="data seed", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("init:O", title="init seed"),
            color=alt.Color("loss:Q", scale=alt.Scale(zero=False), title="loss"),
            tooltip=["init:O", "data:O", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return spec_of(chart, rows_height(len(analysis.noise.grid)))
