"""What a hurried reader takes from the top of a report: the headline, its warnings, what it leaves open."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console
from synthetic import STEPS, losses, write_rates, write_study

from ffnlab.errors import UserError
from ffnlab.study import words
from ffnlab.study.analyse import analyse
from ffnlab.study.load import load_study
from ffnlab.study.report import write_report
from ffnlab.study.terminal import show

START = {
    "gelu": {0: 6.0618, 1: 6.0622, 2: 6.0626},
    "own": {0: 6.0058, 1: 6.1058, 2: 6.2058},
    "swiglu": {0: 6.1640, 1: 6.1643, 2: 6.1646},
}
UNIGRAM = 6.1593


def study_of(folder, values, unigram=None, warmup=None, **more):
    """A study whose runs know what a unigram model reaches and how long their warm-up took."""
    changes = {key: dict(change) for key, change in more.pop("cell_changes", {}).items()}
    if unigram is not None:
        for block in values:
            for seed in values[block]:
                changes.setdefault((block, seed), {})["unigram_loss"] = unigram
    write_study(folder, values, cell_changes=changes, **more)
    if warmup is not None:
        for path in folder.glob("*/config.yaml"):
            path.write_text(re.sub(r"^optim:", f"optim:\n  warmup: {warmup}", path.read_text(), flags=re.MULTILINE))
    return folder


def texts(folder, analysis):
    out = StringIO()
    show(analysis, Console(file=out, width=2000))
    return (folder / "report.html").read_text(), (folder / "report.md").read_text(), out.getvalue()


def problem(analysis, kind):
    return next((p.text for p in analysis.problems if p.kind == kind), "")


def test_blocks_that_learned_nothing_are_named_above_the_answer(tmp_path):
    folder = study_of(tmp_path / "s", START, UNIGRAM)
    (analysis,) = write_report([folder], pictures=False)
    said = problem(analysis, "unlearned")
    assert "swiglu (6.1643)" in said
    assert "own" not in said
    assert "gelu (" not in said.replace("swiglu (", "")
    assert "unigram" in said
    assert "start of training" in said
    html, markdown, _ = texts(folder, analysis)
    assert html.index("swiglu (6.1643)") < html.index('id="study-answer"')
    assert markdown.index("swiglu (6.1643)") < markdown.index("## Answer")


def test_rates_that_were_not_chosen_leave_a_block_learned(tmp_path):
    table = {
        (b, lr, s): (2.0 if lr == 0.1 else 6.0) + 0.01 * s
        for b in ("gelu", "relu")
        for lr in (0.1, 9)
        for s in range(6)
    }
    folder = write_rates(tmp_path / "r", table)
    for path in folder.glob("*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"unigram_loss": 3.0}))
    assert not problem(analyse(load_study(folder)), "unlearned")


@pytest.mark.parametrize(
    ("warmup", "said"), [(STEPS // 2 + 1, True), (STEPS, True), (STEPS // 2, False), (None, False)]
)
def test_a_warm_up_over_half_of_a_run_is_a_warning(tmp_path, warmup, said):
    analysis = analyse(load_study(study_of(tmp_path / "s", START, warmup=warmup)))
    assert bool(problem(analysis, "warmup")) is said
    if said:
        assert f"Warm-up took {warmup} of {STEPS} steps" in problem(analysis, "warmup")
        assert "start of training" in problem(analysis, "warmup")
    assert ("start of training" in words.headline(analysis)) is said


def test_the_unigram_loss_is_a_reference_in_every_report(tmp_path):
    folder = study_of(tmp_path / "s", START, UNIGRAM)
    (analysis,) = write_report([folder], pictures=False)
    assert analysis.scale.endswith("3 seeds; a unigram model's loss is 6.1593")
    for text in texts(folder, analysis):
        assert "unigram" in text.replace(problem(analysis, "unlearned"), "")


def test_the_headline_names_what_is_not_resolved_in_the_tables_order(tmp_path):
    analysis = analyse(load_study(study_of(tmp_path / "s", START)))
    assert words.headline(analysis) == "own is not resolved; swiglu is worse than gelu."
    names = ["a", "b", "c", "d"]
    wide = {"gelu": 0.0, "swiglu": -0.3}
    three = losses(wide | dict.fromkeys(names[:3], 0.0), range(6))
    said = words.headline(analyse(load_study(write_study(tmp_path / "three", three))))
    assert re.fullmatch(r"swiglu is better than gelu; [abc], [abc] and [abc] are not resolved\.", said)
    four = losses(wide | dict.fromkeys(names, 0.0), range(6))
    said = words.headline(analyse(load_study(write_study(tmp_path / "four", four))))
    assert said == "swiglu is better than gelu; 4 not resolved."


def test_a_study_that_resolves_nothing_names_its_blocks(tmp_path):
    values = dict.fromkeys(("gelu", "own"), START["own"])
    assert words.headline(analyse(load_study(write_study(tmp_path / "s", values)))) == (
        "No block is shown to differ from gelu: own is not resolved."
    )


def only(values, *finished):
    return {(b, s): {"status": "missing"} for b in values for s in values[b] if (b, s) not in finished}


def test_an_unfinished_study_says_that_nothing_is_compared(tmp_path):
    changes = only(START, ("gelu", 0), ("own", 0))
    analysis = analyse(load_study(study_of(tmp_path / "s", START, cell_changes=changes)))
    assert words.headline(analysis) == "Nothing has been compared with gelu yet: 2 of 9 cells finished."


def test_comparisons_on_a_part_of_the_cells_say_so(tmp_path):
    done = [(b, s) for b in ("gelu", "swiglu") for s in range(3)]
    analysis = analyse(load_study(study_of(tmp_path / "s", START, cell_changes=only(START, *done))))
    assert words.headline(analysis) == (
        "So far, with 6 of 9 cells finished: swiglu is worse than gelu; own has no verdict yet."
    )
    gone = {("own", 2): {"status": "diverged"}}  # it has ended: nothing more will come
    analysis = analyse(load_study(study_of(tmp_path / "d", START, cell_changes=gone)))
    assert not words.headline(analysis).startswith("So far")


def test_a_finished_study_with_too_few_seeds_is_not_called_unfinished(tmp_path):
    values = {b: {s: v[s] for s in (0, 1)} for b, v in START.items()}
    assert words.headline(analyse(load_study(write_study(tmp_path / "s", values)))) == (
        "No verdict against gelu: it takes 3 finished seeds a block."
    )


def test_rows_come_in_one_order_with_the_baseline_last(tmp_path):
    folder = study_of(tmp_path / "s", START)
    (analysis,) = write_report([folder], pictures=False)
    for text in texts(folder, analysis)[:2]:
        answer = text[text.index("Answer</h2>" if "Answer</h2>" in text else "## Answer") :]
        own, swiglu, gelu = (answer.index(f"{name} is ") for name in ("own", "swiglu", "gelu"))
        assert own < swiglu < gelu


def test_the_middle_of_an_even_number_of_ratios_lies_between_them(tmp_path):
    analysis = analyse(load_study(study_of(tmp_path / "s", losses({"gelu": 0, "a": 0, "b": 0}, range(6)))))
    one, two = (arm.variance_ratio for arm in analysis.arms if not arm.baseline)
    assert f"in the middle {words.number((one + two) / 2, 2)}" in words.pairing(analysis)


def test_a_study_says_what_it_says_nothing_about(tmp_path):
    folder = study_of(tmp_path / "s", START)
    (analysis,) = write_report([folder], pictures=False)
    for text in texts(folder, analysis):
        assert "says nothing about another size, other data, other learning rates or longer training" in text


def test_a_folder_of_single_runs_is_no_study(tmp_path):
    folder = write_study(tmp_path / "outputs", START, manifest=False)
    path = next(folder.glob("own-s1-*")) / "run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps(run | {"hashes": run["hashes"] | {"data": "f00d"}}))
    write_study(folder / "first", START)
    with pytest.raises(UserError, match="no study") as caught:
        write_report([folder])
    assert f"Give the folder of one study, as in {folder / 'first'}" in str(caught.value)
    assert "again" not in str(caught.value)


def test_a_folder_of_studies_is_no_study(tmp_path):
    write_study(tmp_path / "outputs" / "first", START)
    with pytest.raises(UserError, match=re.escape(f"as in {tmp_path / 'outputs' / 'first'}")):
        write_report([tmp_path / "outputs"])


@pytest.mark.parametrize("name", ["study.json", "report.md", "own-s1/run.json"])
def test_a_studys_file_is_answered_with_its_folder(tmp_path, name):
    folder = write_study(tmp_path / "s", START)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(UserError, match=re.escape(f"is a file. Give the study's folder, {folder}.")):
        write_report([path])


def test_runs_side_by_side_are_told_from_a_study(tmp_path):
    values = {b: {0: v[0]} for b, v in START.items()}
    analysis = analyse(load_study(write_study(tmp_path / "outputs", values, manifest=False)))
    assert "no study" in problem(analysis, "undeclared")
    assert "Give the folder of one study" in problem(analysis, "undeclared")
    assert all(
        "1 seeds" not in line for line in [*analysis.limits, *(words.sentence(a, analysis) for a in analysis.arms)]
    )
