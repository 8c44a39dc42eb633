"""The report's pictures: altair charts without a theme, so that the page can draw them light or dark.

Names from configurations enter as data values alone, never as field names or Vega expressions: no name can run code.
Every chart has a parameter ``pick``: the page's legend sets it to bring one block forward.
"""

import math
from typing import TYPE_CHECKING, Any

import altair as alt

from ffnlab.study.answer import Analysis
from ffnlab.study.chart_theme import VERDICTS, Spec
from ffnlab.study.statistics import BETTER, NOT_RESOLVED, WORSE
from ffnlab.study.words import plain

if TYPE_CHECKING:
    import pandas as pd

LEFT_OUT = 0.25  # share of training that loss curves leave out
ZERO = "datum.value === 0 ? '0' : datum.label"
AXES = {"step": "steps", "tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds"}


def names(analysis: Analysis) -> list[str]:
    """Arms in the order of their colours: the baseline, then as the study lists them."""
    base = analysis.study.baseline
    return [plain(arm) for arm in (base, *(a for a in analysis.study.arms if a != base))]


def _color(analysis: Analysis) -> alt.Color:
    return alt.Color("arm:N", title=None, scale=alt.Scale(domain=names(analysis)))


def _data(rows: list[dict[str, Any]]) -> alt.InlineData:
    # numpy scalars and NaN are no JSON
    rows = [{k: v.item() if hasattr(v, "item") else v for k, v in row.items()} for row in rows]
    clean = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    return alt.InlineData(values=clean)


def _records(table: "pd.DataFrame") -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


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
    """Validation loss against ``axis`` (a key of `AXES`): the mean over finished cells, a band over all their seeds.

    Cells that did not finish are dashed lines of their own: averaging them would bend the mean where they stop.
    """
    points = curves[(curves["metric"] == "val/loss") & (curves["layer"] == -1) & curves[axis].notna()].copy()
    points["arm"] = points["arm"].map(plain)
    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    status = dict(zip(cells["cell"], cells["status"], strict=True))
    points["status"] = points["cell"].map(status)
    done = points[points["status"] == "finished"]
    broken = points[points["status"].notna() & (points["status"] != "finished")]
    if done.empty:
        return None
    # The first steps fall from ln(vocabulary): they would flatten everything that the study is about. Left out of the
    # data, as clipping them makes the PNG ten times as slow.
    done = done[done["step"] >= LEFT_OUT * done["step"].max()]
    band = done.groupby(["arm", "step"], sort=False).agg(
        x=(axis, "mean"), mean=("value", "mean"), low=("value", "min"), high=("value", "max"), seeds=("value", "size")
    )
    rows = _records(band.reset_index())
    bottom, top = float(done["value"].min()), float(done["value"].max())
    pad = 0.03 * (top - bottom) or 0.01
    broken = broken[(broken["step"] >= done["step"].min()) & broken["value"].between(bottom - pad, top + pad)]
    x = alt.X(
        "x:Q",
        title=AXES[axis],
        scale=alt.Scale(zero=False),  # the first quarter is left out
        axis=alt.Axis(format="~s", labelExpr=ZERO, tickCount=5, grid=False),
    )
    y_scale = alt.Scale(domain=[bottom - pad, top + pad], zero=False, nice=False)
    base = alt.Chart(_data(rows))
    layers = [
        base.mark_area().encode(
            x=x,
            y=alt.Y("low:Q", title="validation loss (nats per token)", scale=y_scale),
            y2="high:Q",
            color=_color(analysis),
            fillOpacity=_faded(0.1, 0.02),
        ),
        base.mark_line().encode(x=x, y=alt.Y("mean:Q", scale=y_scale), color=_color(analysis), strokeOpacity=_faded()),
        base.mark_point(filled=True, size=26).encode(
            x=x,
            y=alt.Y("mean:Q", scale=y_scale),
            color=_color(analysis),
            fillOpacity=_faded(),
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
    if not broken.empty:
        lines = broken.assign(x=broken[axis], mean=broken["value"])[["arm", "cell", "x", "mean", "status"]]
        layers.append(
            alt.Chart(_data(_records(lines)))
            .mark_line(strokeDash=[4, 3], strokeWidth=1.5)
            .encode(
                x=x,
                y=alt.Y("mean:Q", scale=y_scale),
                color=_color(analysis),
                detail="cell:N",
                strokeOpacity=_faded(),
                tooltip=["cell:N", "status:N", alt.Tooltip("mean:Q", format=".4f")],
            )
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
    x = alt.X("wide_low:Q", title=x_title, axis=alt.Axis(format="+.2~f", labelExpr=ZERO, tickCount=5))
    base = base.encode(y=y, color=color, tooltip=tip)
    wide = base.mark_rule(strokeWidth=1.2).encode(x=x, x2="wide_high:Q")
    thick = base.mark_rule(strokeWidth=5, strokeCap="round", strokeOpacity=0.45).encode(x="low:Q", x2="high:Q")
    point = base.mark_point(filled=True, size=80, opacity=1).encode(x="difference:Q")
    return _spec(alt.layer(zero, wide, thick, point).add_params(_pick()), _rows_height(len(rows)))


def seed_points(analysis: Analysis) -> Spec | None:
    """Every seed's final loss, with each arm's mean as a bar."""
    order = [plain(arm.name) for arm in analysis.arms if arm.n]
    cells = analysis.compared if analysis.compared is not None else analysis.study.cells
    done = cells[cells["status"] == "finished"]
    columns = ["arm", "cell", "loss", "init_seed", "data_seed"]
    rows = [row | {"arm": plain(row["arm"])} for row in _records(done[columns])]
    if not rows:
        return None
    means = [{"arm": plain(arm.name), "mean": arm.mean} for arm in analysis.arms if arm.n]
    y = alt.Y("arm:N", sort=order, title=None, axis=alt.Axis(grid=False, ticks=False, domain=False))
    title = "final validation loss (nats per token)"
    x = alt.X("loss:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    tip = [
        alt.Tooltip("cell:N"),
        alt.Tooltip("init_seed:Q", title="init seed"),
        alt.Tooltip("data_seed:Q", title="data seed"),
        alt.Tooltip("loss:Q", format=".4f"),
    ]
    points = (
        alt.Chart(_data(rows))
        .mark_point(filled=True, size=55)
        .encode(x=x, y=y, color=_color(analysis), fillOpacity=_faded(0.65), strokeOpacity=alt.value(0), tooltip=tip)
    )
    ticks = (
        alt.Chart(_data(means))
        .mark_tick(thickness=2, size=20)
        .encode(
            x="mean:Q",
            y=y,
            color=_color(analysis),
            opacity=_faded(),
            tooltip=["arm:N", alt.Tooltip("mean:Q", format=".4f")],
        )
    )
    return _spec(alt.layer(points, ticks).add_params(_pick()), _rows_height(len(order)))


def dead_maps(analysis: Analysis, curves: "pd.DataFrame", metric: str = "dead/rel") -> dict[str, Spec | None]:
    """One heat map an arm: layers down, steps across, ``metric`` (mean over seeds) as colour, one scale for all.

    None for an arm that has the figure and is 0 everywhere: such a map shows nothing.
    """
    points = curves[(curves["metric"] == metric) & (curves["layer"] >= 0)]
    if analysis.compared is not None:
        points = points[points["cell"].isin(analysis.compared["cell"])]
    if points.empty:
        return {}
    mean = points.groupby(["arm", "layer", "step"], sort=True)["value"].agg(["mean", "size"]).reset_index()
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
            for r in own.to_dict("records")
        ]
        layers = sorted({row["layer"] for row in rows})
        chart = (
            alt.Chart(_data(rows))
            .mark_rect()
            .encode(
                x=alt.X("step:O", title="step", axis=step_axis),
                y=alt.Y("layer:O", title="layer", axis=alt.Axis(ticks=False, domain=False)),
                color=alt.Color("share:Q", title=metric, scale=alt.Scale(domain=[0, top]), legend=legend),
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
    done = done.assign(arm=done["arm"].map(plain), part=["tuning" if s in tuning else "fresh" for s in done["seed"]])
    rows = _records(done[["arm", "lr", "loss", "seed", "part"]])
    means = done[done["part"] == "tuning"].groupby(["arm", "lr"])[["loss"]].mean().reset_index()
    rates = alt.Axis(format="~g", grid=False, values=sorted({row["lr"] for row in rows}))
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False), axis=rates)
    y = alt.Y("loss:Q", title="final validation loss", scale=alt.Scale(zero=False))
    tip = [alt.Tooltip("arm:N"), alt.Tooltip("lr:Q", format="g"), alt.Tooltip("seed:Q"), alt.Tooltip("part:N")]
    tip.append(alt.Tooltip("loss:Q", format=".4f"))
    base = alt.Chart(_data(rows)).encode(x=x, y=y, color=_color(analysis), opacity=_faded(0.8), tooltip=tip)
    lines = (
        alt.Chart(_data(_records(means))).mark_line().encode(x=x, y=y, color=_color(analysis), strokeOpacity=_faded())
    )
    tuned = base.transform_filter("datum.part === 'tuning'").mark_point(filled=True, size=45)
    fresh = base.transform_filter("datum.part === 'fresh'").mark_point(filled=False, size=45)
    return _spec(alt.layer(lines, fresh, tuned).add_params(_pick()), 300)


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
        alt.Chart(_data(rows))
        .mark_rect()
        .encode(
            x=alt.X("data:O", title="data seed", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("init:O", title="init seed"),
            color=alt.Color("loss:Q", scale=alt.Scale(zero=False), title="loss"),
            tooltip=["init:O", "data:O", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return _spec(chart, _rows_height(len(analysis.noise.grid)))
