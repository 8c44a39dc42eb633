import dataclasses
import json

import pytest
from synthetic import STEPS, losses, write_study

from ffnlab.study import chart_parts, chart_theme, charts, loss_chart
from ffnlab.study.analyse import analyse
from ffnlab.study.load import load_curves, load_study

VALUES = losses({"relu": 0.02, "gelu": 0.0, "swiglu": -0.06}, range(5))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    changes = {("relu", 4): {"status": "diverged"}}
    loaded = load_study(write_study(tmp_path_factory.mktemp("c") / "s", VALUES, cell_changes=changes))
    return analyse(loaded), load_curves(loaded)


def values(spec, layer=None):
    """Rows behind a chart, or behind one of its layers."""
    node = spec if layer is None else spec["layer"][layer]
    return spec["datasets"][node.get("data", spec.get("data"))["name"]]


def test_loss_curves_are_mean_and_range_over_finished_seeds(study):
    spec = loss_chart.loss_curves(*study, "step")
    rows = {(r["arm"], r["step"]): r for r in values(spec, 0)}
    last = rows["gelu", STEPS]
    own = list(VALUES["gelu"].values())
    assert last["mean"] == pytest.approx(sum(own) / 5)
    assert (last["low"], last["high"], last["seeds"]) == (min(own), max(own), 5)
    assert rows["relu", STEPS]["seeds"] == 4  # the diverged one is not averaged in
    broken = values(spec, 3)
    assert {r["status"] for r in broken} == {"diverged"}


@pytest.mark.parametrize("axis", list(loss_chart.AXES))
def test_axes(study, axis):
    spec = loss_chart.loss_curves(*study, axis)
    xs = [r["x"] for r in values(spec, 0)]
    assert max(xs) > 0
    assert spec["layer"][0]["encoding"]["x"]["title"] == loss_chart.AXES[axis]
    assert chart_theme.png(spec).startswith(b"\x89PNG")


def test_forest_is_the_declared_analysis(study):
    analysis, _ = study
    rows = {r["arm"]: r for r in values(charts.forest(analysis), 1)}
    assert set(rows) == {"relu", "swiglu"}
    for arm in analysis.arms:
        if arm.primary:
            assert rows[arm.name]["low"] == arm.primary.low
            assert rows[arm.name]["wide_high"] == arm.primary.wide_high
    other = {r["arm"]: r for r in values(charts.forest(analysis, 1), 1)}
    assert other["relu"]["low"] == next(a for a in analysis.arms if a.name == "relu").answers[1].low


def test_every_seed_is_a_point(study):
    spec = charts.seed_points(study[0])
    assert len(values(spec, 0)) == 14


def test_dead_maps_share_one_scale(study):
    maps = charts.dead_maps(*study)
    assert set(maps) == {"relu", "gelu", "swiglu"}
    domains = {tuple(spec["encoding"]["color"]["scale"]["domain"]) for spec in maps.values()}
    assert len(domains) == 1
    rows = values(maps["relu"])
    assert {r["layer"] for r in rows} == {0, 1, 2, 3}
    assert max(r["share"] for r in rows) == domains.pop()[1]


def test_an_arm_without_dead_neurons_has_no_map(study):
    analysis, curves = study
    none = curves["arm"].eq("gelu") & curves["metric"].eq("dead/rel")
    maps = charts.dead_maps(analysis, curves.assign(value=curves["value"].mask(none, 0.0)))
    assert maps["gelu"] is None
    assert maps["relu"] is not None


def test_loss_curves_begin_where_the_first_quarter_ends(study):
    spec = loss_chart.loss_curves(*study, "step")
    assert min(r["x"] for r in values(spec, 0)) >= loss_chart.LEFT_OUT * STEPS
    assert all(layer["encoding"]["x"]["scale"]["zero"] is False for layer in spec["layer"])


def _short(tmp_path, *steps):
    """A study whose cells were validated at these steps alone."""
    folder = write_study(tmp_path / "s", VALUES)
    for path in folder.glob("*/metrics.jsonl"):
        points = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [point for point in points if "val/loss" not in point or point["step"] in steps]
        path.write_text("".join(json.dumps(point) + "\n" for point in kept))
    loaded = load_study(folder)
    return analyse(loaded), load_curves(loaded)


@pytest.mark.parametrize("axis", list(loss_chart.AXES))
def test_a_run_too_short_for_a_validation_at_its_end_is_drawn_to_its_end(tmp_path, axis):
    spec = loss_chart.loss_curves(*_short(tmp_path, 0), axis)
    rows = {(r["arm"], r["step"]): r for r in values(spec, 0)}
    assert {step for _, step in rows} == {0, STEPS}
    assert rows["gelu", STEPS]["mean"] == pytest.approx(sum(VALUES["gelu"].values()) / 5)
    assert rows["gelu", STEPS]["x"] > rows["gelu", 0]["x"] == 0


def test_a_curve_of_one_point_is_a_point(tmp_path):
    spec = loss_chart.loss_curves(*_short(tmp_path), "step")
    assert [r["step"] for r in values(spec, 0)] == [STEPS] * 3
    png = chart_theme.png(spec)
    nothing = dict(spec, layer=[layer for layer in spec["layer"] if layer["mark"]["type"] != "point"])
    assert len(png) > len(chart_theme.png(nothing)) + 500  # its points are there to be seen


def test_profiles_are_final_values_by_layer(study):
    spec = charts.profiles(study[0])["sparsity/zero"]
    rows = values(spec, 0)
    assert {r["arm"] for r in rows} == {"relu"}  # a figure that a block does not have draws no line
    assert [r["value"] for r in rows] == pytest.approx([0.6, 0.65, 0.7, 0.75])


def test_a_profile_of_zeros_and_one_at_fewer_tokens_are_no_charts(study):
    analysis, _ = study
    more = {"dead/contrib": [0.0, 0.0], "dead/rel_n16": [0.5, 0.5]}
    ranges = {name: [(value, value) for value in layers] for name, layers in more.items()}
    arms = [
        dataclasses.replace(arm, by_layer=arm.by_layer | more, layer_ranges=arm.layer_ranges | ranges)
        for arm in analysis.arms
    ]
    found = charts.profiles(dataclasses.replace(analysis, arms=arms))
    assert found["dead/contrib"] is None
    assert "dead/rel_n16" not in found
    assert found["dead/rel"] is not None


def test_the_baseline_has_the_first_colour(study):
    assert chart_parts.names(study[0])[0] == "gelu"
    assert loss_chart.loss_curves(*study, "step")["layer"][0]["encoding"]["color"]["scale"]["domain"][0] == "gelu"


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_ground(scheme):
    ground = _luminance(chart_theme.INK[scheme][3])

    def contrast(colour):
        high, low = sorted((_luminance(colour), ground), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(c) >= 3 for c in [*chart_theme.PALETTES[scheme], *chart_theme.VERDICTS.values()])
    assert all(contrast(c) >= 4.5 for c in chart_theme.INK[scheme][:2])
