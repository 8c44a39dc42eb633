"""The report's pictures: altair charts without a theme, so that the page can draw them light or dark.

Names from configurations only ever enter as data values, never as field names or Vega expressions, so no name can run code.
Every chart has a parameter ``pick``: the page's legend sets it to bring one block forward.
"""

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import altair as alt

from ffnlab.study.analyse import Analysis
from ffnlab.study.statistics import BETTER, NOT_RESOLVED, TOO_FEW, WORSE
from ffnlab.study.words import plain

if TYPE_CHECKING:
    import pandas as pd

Spec = dict[str, Any]

# The first colour is the baseline's. Each has a contrast of 3:1 or more against its ground.
PALETTES = {
    "light": ["#5b6470", "#1f6fd6", "#c8501a", "#0f8a5f", "#a8329a", "#8a6a00", "#0b829e", "#c42f4b", "#6650c9", "#4d7c0f", "#9a4f2f"],
    "dark": ["#a7b0bd", "#6ea8ff", "#ff9461", "#45c795", "#e07fd3", "#d9b441", "#4cc3dd", "#ff7f92", "#a99bff", "#9ccc54", "#d99a79"],
}  # fmt: skip
VERDICTS = {BETTER: "#16915a", WORSE: "#d2445a", NOT_RESOLVED: "#808894", TOO_FEW: "#808894"}
RAMPS = {"light": ["#f1f4f8", "#9fc3ee", "#3f7fd0", "#123c7c"], "dark": ["#1d222b", "#27528f", "#5b9bea", "#d8e9ff"]}
INK = {"light": ("#1d232b", "#5b6470", "#e3e7ec", "#ffffff"), "dark": ("#e8ebef", "#a7b0bd", "#2c333d", "#14181d")}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
ZERO = "datum.value === 0 ? '0' : datum.label"
AXES = {"step": "steps", "tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds"}


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
            "disable": not legend, "labelColor": ink, "titleColor": muted, "titleFontWeight": "normal", "orient": "bottom",
            "columns": 5, "symbolOpacity": 1, "labelLimit": 220, "gradientLength": 160,
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

    return vl_convert.javascript_bundle()


def names(analysis: Analysis) -> list[str]:
    """Arms in the order of their colours: the baseline, then as the study lists them."""
    base = analysis.study.baseline
    return [plain(arm) for arm in (base, *(a for a in analysis.study.arms if a != base))]


def _color(analysis: Analysis) -> alt.Color:
    return alt.Color("arm:N", title=None, scale=alt.Scale(domain=names(analysis)))


def _data(rows: list[dict[str, Any]]) -> alt.InlineData:
    clean = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    return alt.InlineData(values=clean)


def _pick() -> alt.Parameter:
    return alt.param(name="pick", value="")


def _faded(full: float = 1.0, faint: float = 0.12) -> Any:
    return alt.condition("pick === '' || datum.arm === pick", alt.value(full), alt.value(faint))


def _spec(chart: Any, height: int | Spec) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    spec.pop("config", None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def _rows_height(n: int) -> int:
    return max(90, 34 * n + 24)


def loss_curves(analysis: Analysis, curves: "pd.DataFrame", axis: str) -> Spec | None:
    """Validation loss against ``axis`` (a key of `AXES`): the mean over finished cells, a band from the least to the greatest seed.

    Cells that did not finish are dashed lines of their own: averaging them would bend the mean where they stop.
    """
    points = curves[(curves["metric"] == "val/loss") & (curves["layer"] == -1) & curves[axis].notna()].copy()
    points["arm"] = points["arm"].map(plain)
    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    status = dict(zip(cells["cell"], cells["status"], strict=True))
    points["status"] = points["cell"].map(status)
    done, broken = points[points["status"] == "finished"], points[points["status"].notna() & (points["status"] != "finished")]
    if done.empty:
        return None
    band = done.groupby(["arm", "step"], sort=False).agg(
        x=(axis, "mean"), mean=("value", "mean"), low=("value", "min"), high=("value", "max"), seeds=("value", "size")
    )
    rows = band.reset_index().to_dict("records")
    # The first steps fall from ln(vocabulary): they would flatten everything that the study is about.
    early = done[done["step"] >= 0.25 * done["step"].max()]
    bottom, top = float(done["value"].min()), float(early["value"].max())
    pad = 0.03 * (top - bottom) or 0.01
    x = alt.X("x:Q", title=AXES[axis], axis=alt.Axis(format="~s", labelExpr=ZERO, tickCount=5, grid=False))
    y_scale = alt.Scale(domain=[bottom - pad, top + pad], zero=False, nice=False)
    base = alt.Chart(_data(rows))
    layers = [
        base.mark_area(clip=True).encode(
            x=x,
            y=alt.Y("low:Q", title="validation loss (nats per token)", scale=y_scale),
            y2="high:Q",
            color=_color(analysis),
            opacity=_faded(0.1, 0.02),
        ),
        base.mark_line(clip=True).encode(x=x, y=alt.Y("mean:Q", scale=y_scale), color=_color(analysis), opacity=_faded()),
        base.mark_point(clip=True, filled=True, size=26).encode(
            x=x,
            y=alt.Y("mean:Q", scale=y_scale),
            color=_color(analysis),
            opacity=_faded(),
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
    if not broken.empty:
        lines = broken.rename(columns={axis: "x", "value": "mean"}) if axis != "step" else broken.assign(x=broken["step"], mean=broken["value"])
        layers.append(
            alt.Chart(_data(lines[["arm", "cell", "x", "mean", "status"]].to_dict("records")))
            .mark_line(clip=True, strokeDash=[4, 3], strokeWidth=1.5)
            .encode(
                x=x, y=alt.Y("mean:Q", scale=y_scale), color=_color(analysis), detail="cell:N", opacity=_faded(),
                tooltip=["cell:N", "status:N", alt.Tooltip("mean:Q", format=".4f")],
            )  # fmt: skip
        )
    return _spec(alt.layer(*layers).add_params(_pick()), 270)


def forest(analysis: Analysis, which: int = 0) -> Spec | None:
    """Differences to the baseline; ``which`` is 0 for the declared analysis and 1 for the other."""
    rows = []
    for arm in analysis.arms:
        if len(arm.answers) > which and not math.isnan(arm.answers[which].difference):
            a = arm.answers[which]
            rows.append(
                {
                    "arm": plain(arm.name), "difference": a.difference, "low": a.low, "high": a.high, "wide_low": a.wide_low,
                    "wide_high": a.wide_high, "verdict": a.verdict, "p": a.p_adjusted, "n": a.n,
                }
            )  # fmt: skip
    if not rows:
        return None
    color = alt.Color("verdict:N", title=None, scale=alt.Scale(domain=list(VERDICTS)[:3], range=list(VERDICTS.values())[:3]))
    y = alt.Y("arm:N", sort=[r["arm"] for r in rows], title=None, axis=alt.Axis(grid=False, ticks=False, domain=False))
    x_title = f"loss minus {plain(analysis.study.baseline)}'s (nats per token; left is better)"
    base = alt.Chart(_data(rows))
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
    wide = base.mark_rule(strokeWidth=1.2).encode(
        x=alt.X("wide_low:Q", title=x_title, axis=alt.Axis(format="+.2~f", labelExpr=ZERO, tickCount=5)), x2="wide_high:Q", y=y, color=color, tooltip=tip,
    )  # fmt: skip
    thick = base.mark_rule(strokeWidth=5, strokeCap="round", opacity=0.45).encode(x="low:Q", x2="high:Q", y=y, color=color, tooltip=tip)
    point = base.mark_point(filled=True, size=80, opacity=1).encode(x="difference:Q", y=y, color=color, tooltip=tip)
    return _spec(alt.layer(zero, wide, thick, point).add_params(_pick()), _rows_height(len(rows)))


def seed_points(analysis: Analysis) -> Spec | None:
    """Every seed's final loss, with each arm's mean as a bar."""
    order = [plain(arm.name) for arm in analysis.arms if arm.n]
    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    done = cells[cells["status"] == "finished"]
    rows = [
        {"arm": plain(r["arm"]), "seed": r["seed"], "loss": r["loss"], "cell": r["cell"], "init": r["init_seed"], "data": r["data_seed"]}
        for r in done[["arm", "seed", "loss", "cell", "init_seed", "data_seed"]].to_dict("records")
    ]
    if not rows:
        return None
    means = [{"arm": plain(arm.name), "mean": arm.mean} for arm in analysis.arms if arm.n]
    y = alt.Y("arm:N", sort=order, title=None, axis=alt.Axis(grid=False, ticks=False, domain=False))
    x = alt.X("loss:Q", title="final validation loss (nats per token)", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    points = (
        alt.Chart(_data(rows))
        .mark_point(filled=True, size=55)
        .encode(
            x=x, y=y, color=_color(analysis), opacity=_faded(0.65),
            tooltip=["cell:N", alt.Tooltip("init:Q", title="init seed"), alt.Tooltip("data:Q", title="data seed"), alt.Tooltip("loss:Q", format=".4f")],
        )
    )  # fmt: skip
    ticks = alt.Chart(_data(means)).mark_tick(thickness=2, size=20).encode(
        x="mean:Q", y=y, color=_color(analysis), opacity=_faded(), tooltip=["arm:N", alt.Tooltip("mean:Q", format=".4f")]
    )  # fmt: skip
    return _spec(alt.layer(points, ticks).add_params(_pick()), _rows_height(len(order)))


def dead_maps(analysis: Analysis, curves: "pd.DataFrame", metric: str = "dead/rel") -> dict[str, Spec]:
    """One heat map an arm: layers down, steps across, the mean of ``metric`` over seeds as colour, one scale for all."""
    points = curves[(curves["metric"] == metric) & (curves["layer"] >= 0)]
    if analysis.compared is not None:
        points = points[points["cell"].isin(analysis.compared["cell"])]
    if points.empty:
        return {}
    mean = points.groupby(["arm", "layer", "step"], sort=True)["value"].agg(["mean", "size"]).reset_index()
    top = float(mean["mean"].max()) or 1.0
    maps = {}
    for arm in analysis.arms:
        own = mean[mean["arm"] == arm.name]
        if own.empty:
            continue
        rows = [
            {"layer": int(r["layer"]), "step": int(r["step"]), "share": float(r["mean"]), "seeds": int(r["size"])}
            for r in own.to_dict("records")
        ]
        layers = sorted({row["layer"] for row in rows})
        chart = (
            alt.Chart(_data(rows))
            .mark_rect()
            .encode(
                x=alt.X("step:O", title="step", axis=alt.Axis(labelAngle=0, labelOverlap=True, format="~s", ticks=False, domain=False)),
                y=alt.Y("layer:O", title="layer", axis=alt.Axis(ticks=False, domain=False)),
                color=alt.Color(
                    "share:Q", title=metric, scale=alt.Scale(domain=[0, top]), legend=alt.Legend(format=".1%", gradientLength=160)
                ),
                tooltip=["layer:O", "step:O", alt.Tooltip("share:Q", title=metric, format=".2%"), "seeds:Q"],
            )
        )
        maps[arm.name] = _spec(chart, min(320, max(90, 24 * len(layers))))
    return maps


def profiles(analysis: Analysis) -> dict[str, Spec]:
    """One chart a census figure: its final value by layer, a line an arm."""
    metrics = sorted({metric for arm in analysis.arms for metric in arm.by_layer})
    return {metric: spec for metric in metrics if (spec := _profile(analysis, metric)) is not None}


def _profile(analysis: Analysis, metric: str) -> Spec | None:
    rows = [
        {"arm": plain(arm.name), "layer": layer, "value": value}
        for arm in analysis.arms
        for layer, value in enumerate(arm.by_layer.get(metric, []))
    ]
    if not rows or metric.startswith("census/"):
        return None
    base = alt.Chart(_data(rows)).encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, grid=False)),
        y=alt.Y("value:Q", title=None, axis=alt.Axis(format="~%", tickCount=4)),
        color=_color(analysis),
        opacity=_faded(),
        tooltip=[alt.Tooltip("arm:N", title="block"), "layer:O", alt.Tooltip("value:Q", title=metric, format=".2%")],
    )
    return _spec(alt.layer(base.mark_line(), base.mark_point(filled=True, size=40)).add_params(_pick()), 180)


def rate_curves(analysis: Analysis) -> Spec | None:
    """Loss against learning rate: tuning seeds filled, fresh ones hollow, the tuning mean as a line."""
    cells = analysis.study.cells
    done = cells[(cells["status"] == "finished") & cells["lr"].notna()]
    if done.empty or not analysis.rates:
        return None
    tuning = set(analysis.tuning_seeds)
    rows = [
        {"arm": plain(r["arm"]), "lr": r["lr"], "loss": r["loss"], "seed": r["seed"], "part": "tuning" if r["seed"] in tuning else "fresh"}
        for r in done[["arm", "lr", "loss", "seed"]].to_dict("records")
    ]
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format="~g", grid=False, values=sorted({row["lr"] for row in rows})))
    y = alt.Y("loss:Q", title="final validation loss", scale=alt.Scale(zero=False))
    tip = ["arm:N", alt.Tooltip("lr:Q", format="g"), "seed:Q", "part:N", alt.Tooltip("loss:Q", format=".4f")]
    base = alt.Chart(_data(rows)).encode(x=x, y=y, color=_color(analysis), opacity=_faded(0.8))
    mean = _data(
        [
            {"arm": plain(str(arm)), "lr": lr, "loss": loss}
            for (arm, lr), loss in done[done["seed"].isin(tuning)].groupby(["arm", "lr"])["loss"].mean().items()  # type: ignore[misc]
        ]
    )
    lines = alt.Chart(mean).mark_line().encode(x=x, y=y, color=_color(analysis), opacity=_faded())
    tuned = base.transform_filter("datum.part === 'tuning'").mark_point(filled=True, size=45).encode(tooltip=tip)
    fresh = base.transform_filter("datum.part === 'fresh'").mark_point(filled=False, size=45).encode(tooltip=tip)
    return _spec(alt.layer(lines, fresh, tuned).add_params(_pick()), 300)


def noise_grid(analysis: Analysis) -> Spec | None:
    """The crossed grid: init seeds down, data seeds across, loss as colour."""
    if analysis.noise is None:
        return None
    rows = [
        {"init": int(i), "data": int(j), "loss": float(loss)}  # type: ignore[call-overload]
        for i, row in analysis.noise.grid.iterrows()
        for j, loss in row.items()
    ]
    encode = {"x": alt.X("data:O", title="data seed", axis=alt.Axis(labelAngle=0)), "y": alt.Y("init:O", title="init seed")}
    scale = alt.Scale(zero=False)
    tip: Sequence[Any] = ["init:O", "data:O", alt.Tooltip("loss:Q", format=".4f")]
    chart = alt.Chart(_data(rows)).mark_rect().encode(color=alt.Color("loss:Q", scale=scale, title="loss"), tooltip=list(tip), **encode)
    return _spec(chart, _rows_height(len(analysis.noise.grid)))
