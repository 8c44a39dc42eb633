"""What a report shows of the insides: on how many tokens, how far seeds lie apart, what the words mean, whose code."""

import html
import json
from pathlib import Path

import pytest
from synthetic import cell_name, losses, write_study

from ffnlab.study import charts, loss_chart, origin, page
from ffnlab.study.analyse import analyse
from ffnlab.study.load import load_curves, load_study
from ffnlab.study.report import figure_names, write_report

ROOT = Path(__file__).parents[2]
VALUES = losses({"gelu": 0.0, "own": 0.1, "swiglu": -0.06}, range(3))
DEAD = (0.379, 0.0, 0.320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """own has dead neurons in layer 1 of two seeds in three, and a file of its own."""
    own = {("own", seed): {"code": "0wn" * 5} for seed in range(3)}
    folder = write_study(tmp_path_factory.mktemp("inside") / "s", VALUES, cell_changes=own)
    for seed, dead in enumerate(DEAD):
        path = folder / cell_name("own", seed) / "result.json"
        change = {"dead/rel_L1": dead, "dead/rel": dead / 4, "dead/contrib": 0.0}
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    write_report([folder], pictures=False)
    return folder


def both(folder):
    return html.unescape((folder / "report.html").read_text()), (folder / "report.md").read_text().replace("\\", "")


def test_each_figure_says_on_how_many_tokens_it_rests(folder):
    for text in both(folder):
        assert "Every census looked at" not in text
        assert "The table and the profiles rest on 65,536 tokens" in text
        assert "The heat maps rest on the censuses on the way, 8,192 tokens each" in text


def test_seeds_that_lie_far_apart_are_not_hidden_by_their_mean(folder):
    analysis = analyse(load_study(folder))
    arm = next(arm for arm in analysis.arms if arm.name == "own")
    assert arm.layer_ranges["dead/rel"][1] == (0.0, 0.379)
    assert arm.ranges["dead/rel"] == (0.0, pytest.approx(0.379 / 4))
    for text in both(folder):
        assert "0.00 to 9.47" in text
    spec = charts.profiles(analysis)["dead/rel"]
    rows = spec["datasets"][spec["data"]["name"] if "data" in spec else spec["layer"][0]["data"]["name"]]
    (row,) = [row for row in rows if row["arm"] == "own" and row["layer"] == 1]
    assert (row["low"], row["high"]) == (0.0, 0.379)
    (heat,) = [charts.dead_maps(analysis, load_curves(analysis.study))["own"]]
    assert all(row["low"] <= row["share"] <= row["high"] for row in heat["datasets"][heat["data"]["name"]])


def test_a_block_with_many_dead_neurons_is_remarked_on_in_the_answer(folder):
    analysis = analyse(load_study(folder))
    (remark,) = analysis.remarks
    assert remark == (
        "own has many dead neurons (dead/rel on the final census): "
        "in layer 1 23.3% on average and 0.0% to 37.9% by seed."
    )
    page_text, markdown = both(folder)
    assert page_text.index('id="study-answer"') < page_text.index(remark) < page_text.index('id="study-table"')
    assert markdown.index("## Answer") < markdown.index(remark) < markdown.index("| block |")
    (record,) = json.loads((folder / "report.json").read_text())["studies"]
    assert record["remarks"] == [remark]


def test_every_figure_that_is_shown_is_defined(folder):
    names = figure_names(analyse(load_study(folder)))
    assert "dead/contrib" in names
    for text in both(folder):
        assert all(page.TERMS[name] in text for name in names)
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in metrics for name in page.TERMS)


def test_no_block_hides_another_in_a_profile(folder):
    spec = charts.profiles(analyse(load_study(folder)))["dormant/rate"]
    rows = spec["datasets"][spec["data"]["name"] if "data" in spec else spec["layer"][0]["data"]["name"]]
    assert len({row["at"] for row in rows if row["layer"] == 1}) == 3
    assert all(abs(row["at"] - row["layer"]) < 0.5 for row in rows)
    (line,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
    scale = line["encoding"]["strokeDash"]["scale"]
    assert scale["domain"][0] == "gelu"
    assert len(set(map(tuple, scale["range"]))) == len(scale["domain"]) == 3


def test_two_fingerprints_say_which_blocks_they_belong_to(folder):
    facts = dict(origin.provenance(analyse(load_study(folder))))
    lines = facts["Code fingerprint"]
    assert "0wn" * 5 + ": own" in lines
    assert "c0de" * 4 + ": gelu, swiglu" in lines
    assert "the same in all runs" in facts["Package"][0]


def test_a_value_that_differs_within_a_block_counts_its_runs(tmp_path):
    change = {("gelu", 1): {"git": {"revision": "f00d", "dirty": False}}}
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes=change))
    assert "f00d: 1 of 9 runs" in dict(origin.provenance(analyse(study)))["Revision"]


@pytest.mark.parametrize(("unigram", "drawn"), [(1.9, True), (9.0, False)])
def test_the_unigram_loss_is_a_line_among_curves_that_are_near_it(tmp_path, unigram, drawn):
    changes = {(block, seed): {"unigram_loss": unigram} for block in VALUES for seed in range(3)}
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes=changes))
    spec = loss_chart.loss_curves(analyse(study), load_curves(study), "step")
    assert ("unigram model" in json.dumps(spec)) is drawn
