import json

import numpy as np
import pytest
from synthetic import cell_name, losses, write_cell, write_grid, write_rates, write_study

from ffnlab.errors import UserError
from ffnlab.study.analyse import analyse
from ffnlab.study.checks import problems, refuse_unequal
from ffnlab.study.load import load_curves, load_study
from ffnlab.study.words import headline

VALUES = losses({"gelu": 0.0, "relu": 0.02, "swiglu": -0.06}, range(4))


def kinds(study):
    return [p.kind for p in problems(study)]


def test_a_clean_study(tmp_path):
    study = load_study(write_study(tmp_path / "clean", VALUES))
    assert study.arms == ["gelu", "relu", "swiglu"]
    assert (study.baseline, study.analysis, study.kind, study.declared) == ("gelu", "unpaired", "blocks", True)
    row = study.cells.set_index("cell").loc[cell_name("swiglu", 2)]
    assert row["loss"] == VALUES["swiglu"][2]
    assert (row["status"], row["d_ff"], row["seed"]) == ("finished", 256, 2)
    assert problems(study) == []
    refuse_unequal(study)


def test_curves(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    path = folder / cell_name("gelu", 0) / "metrics.jsonl"
    # resumed: a step logged twice; killed: the last line torn
    path.write_text(path.read_text() + '{"step": 500, "tokens": 512000, "val/loss": 7.5}\n{"step": 600, "val/lo')
    curves = load_curves(load_study(folder))
    own = curves[curves["cell"] == cell_name("gelu", 0)]
    last = own[(own["metric"] == "val/loss") & (own["step"] == 500)]
    assert list(last["value"]) == [7.5]
    assert last["flops"].iloc[0] == 512000 * 6 * 154560
    assert sorted(own.loc[own["metric"] == "dead/rel", "layer"].unique()) == [-1, 0, 1, 2, 3]


def test_a_folder_of_runs(tmp_path):
    study = load_study(write_study(tmp_path / "loose", VALUES, manifest=False))
    assert study.arms == ["gelu", "relu", "swiglu"]
    assert study.baseline == "gelu"
    assert study.command == "python train.py ffn=gelu seed=0"
    assert kinds(study) == ["undeclared"]


def test_statuses(tmp_path):
    changes = {
        ("swiglu", 0): {"status": "diverged", "diverged": {"step": 120, "tensor": "blocks.2.ffn.down", "lr": 0.01}},
        ("swiglu", 1): {"status": "failed", "run_status": "running", "error": "RuntimeError: out of memory"},
        ("swiglu", 2): {"status": "missing"},
        ("relu", 1): {"status": "interrupted"},
    }
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes=changes))
    status = study.cells.set_index(["block", "seed"])["status"]
    assert [status["swiglu", s] for s in range(4)] == ["diverged", "failed", "missing", "finished"]
    assert status["relu", 1] == "interrupted"
    assert kinds(study) == ["diverged", "failed", "missing", "unfinished"]
    error = study.cells.set_index(["block", "seed"])["error"]
    assert "step 120 in blocks.2.ffn.down" in error["swiglu", 0]
    arm = next(arm for arm in analyse(study).arms if arm.name == "swiglu")
    assert arm.counts == {"diverged": 1, "failed": 1, "finished": 1, "missing": 1}
    assert arm.primary.verdict == "too few seeds"


def test_a_finished_run_without_its_result_is_not_finished(tmp_path):
    folder = write_study(tmp_path / "s", VALUES, manifest=False)
    (folder / cell_name("relu", 0) / "result.json").unlink()
    status = load_study(folder).cells.set_index("cell")["status"]
    assert status[cell_name("relu", 0)] == "interrupted"


def test_a_result_that_is_no_number_is_divergence(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    path = folder / cell_name("relu", 0) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"val/loss": float("nan")}))
    study = load_study(folder)
    assert study.cells.set_index("cell")["status"][cell_name("relu", 0)] == "diverged"
    assert len(study.cells) == 12


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"code": "other"}, "stale"),
        ({"package_code": "other"}, "stale"),
        ({"git": {"revision": "abc", "dirty": True}}, "dirty"),
        ({"budget": {"kind": "none", "d_ff": 512, "matched": False, "mismatch": 0.5}}, "unmatched"),
        ({"hardware": {"device": "cuda"}}, "hardware"),
    ],
)
def test_what_is_said_in_red(tmp_path, change, kind):
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes={("relu", 1): change}))
    assert kind in kinds(study)


def test_a_block_of_ones_own_has_code_of_its_own(tmp_path):
    """Its file is in its fingerprint; that makes no cell stale."""
    changes = {("relu", seed): {"code": "other"} for seed in range(4)}
    assert "stale" not in kinds(load_study(write_study(tmp_path / "s", VALUES, cell_changes=changes)))


def test_a_study_that_learned_nothing_says_so(tmp_path):
    for name, unigram, said in (("none", 0.0, True), ("some", 99.0, False)):
        changes = {(block, seed): {"unigram_loss": unigram} for block in VALUES for seed in range(4)}
        study = load_study(write_study(tmp_path / name, VALUES, cell_changes=changes))
        assert ("unlearned" in kinds(study)) is said


def test_a_study_without_a_finished_cell_has_no_verdict(tmp_path):
    changes = {(block, seed): {"status": "running"} for block in VALUES for seed in range(4)}
    folder = write_study(tmp_path / "s", VALUES, cell_changes=changes)
    for result in folder.glob("*/result.json"):
        result.unlink()
    manifest = json.loads((folder / "study.json").read_text())
    for cell in manifest["cells"].values() if isinstance(manifest["cells"], dict) else manifest["cells"]:
        cell["status"] = "running"
    (folder / "study.json").write_text(json.dumps(manifest))
    study = load_study(folder)
    assert "empty" in kinds(study)
    assert headline(analyse(study)) == "No verdict: 0 of 12 cells finished."


def test_unmatched_blocks_are_labelled_wherever_named(tmp_path):
    change = {"budget": {"kind": "none", "d_ff": 512, "matched": False, "mismatch": 0.5}}
    changes = {("gelu", s): change for s in range(4)}
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes=changes))
    assert study.baseline == "gelu (unmatched)"
    assert study.arms == ["gelu (unmatched)", "relu", "swiglu"]


def test_stale_in_the_manifest(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    manifest = json.loads((folder / "study.json").read_text())
    manifest["cells"][cell_name("relu", 0)]["status"] = "stale"
    (folder / "study.json").write_text(json.dumps(manifest))
    study = load_study(folder)
    assert kinds(study) == ["stale"]
    assert study.cells.set_index("cell")["status"][cell_name("relu", 0)] == "finished"


@pytest.mark.parametrize("name", ["data", "batches", "shared_init"])
def test_differing_hashes_are_refused(tmp_path, name):
    hashes = {"data": None, "batches": None, "shared_init": None}
    folder = write_study(tmp_path / "s", VALUES)
    path = folder / cell_name("relu", 1) / "run.json"
    run = json.loads(path.read_text())
    hashes = run["hashes"] | {name: "f00d"}
    path.write_text(json.dumps(run | {"hashes": hashes}))
    with pytest.raises(UserError, match="cannot be compared") as caught:
        analyse(load_study(folder))
    assert cell_name("relu", 1) in str(caught.value)


def test_arms_of_another_shape_may_have_other_shared_weights(tmp_path):
    changes = {("relu", s): {"hashes": {"data": "d", "batches": f"b{s}", "shared_init": f"wide{s}"}} for s in range(4)}
    changes |= {
        (b, s): {"hashes": {"data": "d", "batches": f"b{s}", "shared_init": f"x{s}"}}
        for b in ("gelu", "swiglu")
        for s in range(4)
    }
    overrides = {"relu": ["model.d_model=192"]}
    study = load_study(write_study(tmp_path / "s", VALUES, cell_changes=changes, overrides=overrides))
    refuse_unequal(study)
    assert kinds(study) == ["confounded", "shared_init"]


def test_settings_tell_arms_of_one_block_apart(tmp_path):
    folder = tmp_path / "norms"
    cells = {}
    for norm in ("pre", "post"):
        for seed in range(3):
            name = cell_name("gelu", seed, norm)
            result = write_cell(
                folder, "gelu", seed, 1.9 + 0.1 * (norm == "post") + 0.01 * seed, name=name, study="norms"
            )
            cells[name] = {
                "block": "gelu",
                "seed": seed,
                "overrides": ["ffn=gelu", f"model.norm={norm}"],
                "status": "finished",
                "result": result,
            }
    (folder / "study.json").write_text(
        json.dumps({"study": "norms", "cells": cells, "analysis": "unpaired", "baseline": "gelu · norm=pre"})
    )
    study = load_study(folder)
    assert study.arms == ["gelu · norm=pre", "gelu · norm=post"]
    assert analyse(study).arms[1].primary.verdict == "worse"
    assert load_study(folder, baseline="gelu").baseline == "gelu · norm=pre"


def test_noise_floor_and_rates_are_recognised(tmp_path):
    grid = np.random.default_rng(0).standard_normal((4, 4)) * 0.01 + 2
    noise = analyse(load_study(write_grid(tmp_path / "n", grid)))
    assert noise.noise is not None
    assert noise.noise.grid.to_numpy() == pytest.approx(grid)
    table = {
        (b, lr, s): 2 + abs(lr - best) + 0.001 * s
        for b, best in (("gelu", 0.1), ("relu", 0.2))
        for lr in (0.05, 0.1, 0.2, 0.4)
        for s in range(6)
    }
    rates = analyse(load_study(write_rates(tmp_path / "r", table)))
    assert {rate.arm: rate.lr for rate in rates.rates} == {"gelu": 0.1, "relu": 0.2}
    assert rates.tuning_seeds == [0, 1]
    assert all(sorted(arm.losses) == [2, 3, 4, 5] for arm in rates.arms)
    declared = analyse(load_study(write_rates(tmp_path / "r2", table, tuning_seeds=[5])))
    assert declared.tuning_seeds == [5]


def test_a_block_that_diverged_is_not_called_better_by_its_survivors(tmp_path):
    values = losses({"gelu": 0.0, "swiglu": -0.2, "relu": 0.2}, range(6))
    better = analyse(load_study(write_study(tmp_path / "a", values)))
    assert {arm.name: arm.primary.verdict for arm in better.arms if arm.primary} == {
        "swiglu": "better",
        "relu": "worse",
    }
    changes = {("swiglu", 5): {"status": "diverged"}}
    lost = analyse(load_study(write_study(tmp_path / "b", values, cell_changes=changes)))
    assert {arm.name: arm.primary.verdict for arm in lost.arms if arm.primary} == {
        "swiglu": "not resolved",
        "relu": "worse",
    }
    lost = analyse(load_study(write_study(tmp_path / "c", values, cell_changes={("gelu", 5): {"status": "diverged"}})))
    assert {arm.name: arm.primary.verdict for arm in lost.arms if arm.primary} == {
        "swiglu": "better",
        "relu": "not resolved",
    }


@pytest.mark.parametrize("analysis", ["unpaired", "paired"])
def test_the_declared_analysis_is_primary(tmp_path, analysis):
    arms = analyse(load_study(write_study(tmp_path / "s", VALUES, analysis=analysis))).arms
    for arm in arms:
        if arm.answers:
            assert [a.primary for a in arm.answers] == [True, False]
            assert arm.answers[0].analysis == analysis


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "study.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "study.json").write_text("[]"), "JSON object"),
        (lambda f: (f / "study.json").write_text('{"cells": {}}'), "holds no runs"),
    ],
)
def test_a_damaged_study(tmp_path, break_it, message):
    folder = write_study(tmp_path / "s", VALUES)
    break_it(folder)
    with pytest.raises(UserError, match=message):
        load_study(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"), [("run.json", "x", "cannot be read"), ("config.yaml", "a: [}", "not valid YAML")]
)
def test_a_cell_with_a_damaged_record_is_left_out_and_named(tmp_path, file, content, message):
    folder = write_study(tmp_path / "s", VALUES)
    cell = cell_name("gelu", 0)
    (folder / cell / file).write_text(content)
    analysis = analyse(load_study(folder))
    assert analysis.baseline.n == 3
    problem = analysis.problems[0]
    assert (problem.kind, problem.cells) == ("damaged", (cell,))
    assert "1 of 12 cells" in problem.text
    assert message in problem.text


def test_wrong_places(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    with pytest.raises(UserError, match="no folder"):
        load_study(tmp_path / "nowhere")
    with pytest.raises(UserError, match="one run, not a study"):
        load_study(folder / cell_name("gelu", 0))
    with pytest.raises(UserError, match="gelu, relu, swiglu"):
        load_study(folder, baseline="gleu")
    with pytest.raises(UserError, match="unpaired or paired"):
        load_study(write_study(tmp_path / "t", VALUES, analysis="bayes"))


def test_another_baseline_than_declared_is_said(tmp_path):
    study = load_study(write_study(tmp_path / "s", VALUES), baseline="relu")
    assert "undeclared" in kinds(study)
