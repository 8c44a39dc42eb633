import csv
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from synthetic import EFFECTS, cell_name, losses, write_grid, write_rates, write_study

from ffnlab.study import origin, words
from ffnlab.study.analyse import analyse
from ffnlab.study.load import load_study
from ffnlab.study.remarks import SCOPE
from ffnlab.study.report import figure_names, write_report
from ffnlab.study.terminal import show

ROOT = Path(__file__).parents[2]
VALUES = losses({"gelu": 0.0, "relu": 0.004, "swiglu": -0.06}, range(6))
NASTY = '<script>window.pwned=1</script><img src=x onerror="window.pwned=1">|`[x](javascript:1)\x1b[31m'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("r") / "glu", losses(EFFECTS, range(6)))
    write_report([folder])
    return folder


def test_json_says_what_the_analysis_says(report):
    record = json.loads((report / "report.json").read_text())
    analysis = analyse(load_study(report))
    (study,) = record["studies"]
    assert [arm["name"] for arm in study["arms"]] == [arm.name for arm in analysis.arms]
    for arm, said in zip(analysis.arms, study["arms"], strict=True):
        assert said["mean"] == arm.mean
        if arm.primary:
            assert said["answers"][0]["p_adjusted"] == arm.primary.p_adjusted
            assert said["verdict"] == arm.primary.verdict
            assert said["answers"][0]["primary"] is True
            assert said["answers"][1]["primary"] is False
    assert len(study["cells"]) == 48
    assert study["provenance"]["Command"].startswith("python train.py -m ffn=gelu,")


def test_json_is_the_same_again_and_speed_is_set_apart(report, tmp_path):
    values = losses(EFFECTS, range(6))
    slower = {(b, s): {"seconds": 999.0, "created": "2031-01-01T00:00:00+00:00"} for b in EFFECTS for s in range(6)}
    other = write_study(tmp_path / "glu", values, cell_changes=slower)
    write_report([other], pictures=False)
    first, second = (json.loads((f / "report.json").read_text()) for f in (report, other))
    assert first["studies"][0]["timing"] != second["studies"][0]["timing"]
    for record in (first, second):
        del record["studies"][0]["timing"]
    assert first == second


def test_every_chart_has_its_png(report):
    markdown = (report / "report.md").read_text()
    linked = re.findall(r"\]\((charts/[^)]+)\)", markdown)
    assert {
        "charts/forest.png",
        "charts/seeds.png",
        "charts/loss-step.png",
        "charts/loss-tokens.png",
        "charts/loss-flops.png",
        "charts/loss-seconds.png",
        "charts/dead-relu.png",
        "charts/profile-gate-never-open.png",
        "charts/profile-sparsity-rel.png",
    } <= set(linked)
    for name in [*linked, "charts/forest-other.png"]:
        content = (report / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 3000


def test_page_and_markdown_hold_every_verdict_in_words(report):
    analysis = analyse(load_study(report))
    html, markdown = (report / "report.html").read_text(), (report / "report.md").read_text()
    text = _Text.of(html)
    for arm in analysis.arms:
        assert words.sentence(arm, analysis) in text
        assert words.markdown(words.sentence(arm, analysis)) in markdown
    assert f"`{analysis.study.command}`" in markdown  # to be copied: no escapes
    for fact in (
        "python train.py -m ffn=gelu",
        "0123456789abcdef0123456789abcdef01234567",
        analysis.study.cells["hash_data"][0],
    ):
        assert fact in text
        assert fact in markdown


class _Text(HTMLParser):
    """Visible text and what the page would load."""

    def __init__(self):
        super().__init__()
        self.parts, self.loads, self.ids, self.targets, self.hidden = [], [], set(), set(), 0
        self.handlers = []

    @classmethod
    def of(cls, html):
        return cls.parsed(html).text

    @classmethod
    def parsed(cls, html):
        parser = cls()
        parser.feed(html)
        return parser

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.parts))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.hidden += tag in ("script", "style")
        self.loads += [attrs[k] for k in ("src", "srcset", "data") if attrs.get(k)]
        self.handlers += [k for k in attrs if k.startswith("on")]
        self.ids.add(attrs.get("id"))
        if tag == "a":
            self.targets.add(attrs["href"])
        if tag == "link":
            self.loads.append(attrs.get("href"))

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)


def test_page_loads_nothing_and_its_contents_lead_somewhere(report):
    page = _Text.parsed((report / "report.html").read_text())
    assert page.loads == []
    assert page.targets
    assert all(target.startswith("#") and target[1:] in page.ids for target in page.targets)


def test_names_are_text_everywhere(tmp_path):
    values = {NASTY: VALUES["swiglu"], "gelu": VALUES["gelu"]}
    change = {(NASTY, 0): {"error": NASTY, "git": {"revision": NASTY, "dirty": False}}}
    folder = write_study(tmp_path / "s", values, command=NASTY, study=NASTY, cell_changes=change)
    analyses = write_report([folder], pictures=False)
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    page = _Text.parsed(html)
    assert page.loads == []
    assert page.handlers == []
    assert html.count("<script>") == 2  # the library and the page's own
    assert "<script" not in markdown
    assert "<img" not in markdown
    assert "[x](javascript" not in markdown
    out = StringIO()
    show(analyses[0], Console(file=out, width=140))
    assert "\x1b[31m" not in out.getvalue()
    assert "\x1b" not in html + markdown


def test_figures_that_are_zero_everywhere_are_a_sentence(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    for path in folder.glob("*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(
            json.dumps({key: 0.0 if key.startswith("dormant/") else value for key, value in result.items()})
        )
    write_report([folder], pictures=False)
    for text in (_Text.of((folder / "report.html").read_text()), (folder / "report.md").read_text()):
        assert "Zero in every layer of every block: dormant/rate." in text


def test_the_cells_lie_beside_as_a_table(report, tmp_path):
    changes = {
        ("relu", 1): {"status": "diverged", "error": 'loss, "nan"\nin step 3'},
        ("swiglu", 2): {"status": "missing"},
    }
    folder = write_study(tmp_path / "s", VALUES, cell_changes=changes)
    (analysis,) = write_report([folder], out=tmp_path / "out", pictures=False)
    with (tmp_path / "out" / "cells.csv").open(newline="") as file:
        rows = {row["cell"]: row for row in csv.DictReader(file)}
    assert len(rows) == len(analysis.study.cells) == 18
    for cell in analysis.study.cells.to_dict("records"):
        row = rows[cell["cell"]]
        assert (row["block"], int(row["seed"]), row["status"]) == (cell["block"], cell["seed"], cell["status"])
        assert (tmp_path / "out" / row["directory"]).resolve() == (folder / cell["cell"]).resolve()
        if cell["status"] == "finished":
            result = json.loads((folder / cell["cell"] / "result.json").read_text())
            shown = {key: float(row[key]) for key in row if "/" in key and row[key]}
            assert shown == {key: value for key, value in result.items() if "/" in key and "_L" not in key}
            assert [float(row[key]) for key in ("tokens", "seconds")] == [result["tokens"], result["seconds"]]
            assert int(row["params"]) == cell["params"]
        else:
            assert row["val/loss"] == ""
    assert rows[cell_name("relu", 1)]["error"] == 'loss, "nan" in step 3'
    assert "dead/exact" in rows[cell_name("relu", 0)]
    assert rows[cell_name("gelu", 0)]["dead/exact"] == ""  # it has no such figure, which is not 0


@pytest.mark.parametrize(
    ("commands", "declared", "said"),
    [
        (["python train.py -m ffn=gelu,relu study=s"], {}, ["python train.py -m ffn=gelu,relu study=s"]),
        (
            [
                "python train.py -m ffn=gelu,relu study=s",
                "python train.py -m ffn=gelu,relu study=s retry=true baseline=relu",
            ],
            {"baseline": "relu"},
            ["python train.py -m ffn=gelu,relu study=s baseline=relu"],
        ),
        (
            ["python train.py -m ffn=gelu,relu analysis=paired study=s", "python train.py ffn=gelu seed=9 study=s"],
            {"analysis": "paired"},
            [
                "python train.py -m ffn=gelu,relu analysis=paired study=s",
                "python train.py ffn=gelu seed=9 study=s analysis=paired",
            ],
        ),
        (
            ["python train.py -m 'ffn=gelu,relu' ++baseline=relu"],
            {"baseline": "swiglu (wide)"},
            ["python train.py -m ffn=gelu,relu 'baseline=\"swiglu (wide)\"'"],
        ),
    ],
)
def test_the_commands_make_the_same_study_again(tmp_path, commands, declared, said):
    folder = write_study(tmp_path / "s", VALUES, command=commands[0], commands=commands, **declared)
    manifest = json.loads((folder / "study.json").read_text())
    study = load_study(write_study(tmp_path / "loaded", VALUES))
    assert origin.commands(dataclasses.replace(study, path=folder, command=manifest["command"])) == said


def test_the_report_says_how_to_write_it_again(tmp_path, monkeypatch):
    folder = write_study(tmp_path / "a b", VALUES)
    monkeypatch.chdir(tmp_path)
    (analysis,) = write_report([Path("a b")], out=Path("out"), baseline="relu", pictures=False)
    assert analysis.study.baseline == "relu"
    html = _Text.of((tmp_path / "out" / "report.html").read_text())
    command = re.search(r"This report ?(\S+ \S+ 'a b' --out out --baseline relu)", html)[1]
    first = (tmp_path / "out" / "report.json").read_bytes()
    (tmp_path / "out" / "report.json").unlink()
    env = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command + " --no-pictures", shell=True, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.json").read_bytes() == first
    assert folder.is_dir()


def test_problems_stand_in_red_at_the_top(tmp_path):
    changes = {
        ("swiglu", 2): {"status": "diverged"},
        ("relu", 1): {"status": "failed", "error": "RuntimeError: boom"},
        ("relu", 2): {"status": "missing"},
        ("relu", 0): {"code": "other", "budget": {"kind": "none", "matched": False, "mismatch": 0.5}},
    }
    folder = write_study(tmp_path / "s", VALUES, cell_changes=changes)
    (analysis,) = write_report([folder], pictures=False)
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    for problem in analysis.problems:
        assert problem.text in _Text.of(html)
        assert html.index('class="alarm"') < html.index('id="study-answer"')
        assert markdown.index(words.markdown(problem.text)) < markdown.index("## Answer")
    assert {p.kind for p in analysis.problems} == {"diverged", "failed", "missing", "stale", "unmatched"}
    assert "RuntimeError: boom" in _Text.of(html)
    out = StringIO()
    show(analysis, Console(file=out, width=140, force_terminal=True, color_system="standard"))
    for problem in analysis.problems:
        assert f"\x1b[31m! {problem.text[:40]}" in out.getvalue()


def test_too_few_seeds_are_said(tmp_path):
    folder = write_study(tmp_path / "s", losses({"gelu": 0.0, "swiglu": -0.5}, range(2)))
    (analysis,) = write_report([folder], pictures=False)
    text = _Text.of((folder / "report.html").read_text())
    assert "swiglu has too few seeds for a verdict" in text
    assert "fewer than 3 a block there is no interval" in text
    assert [arm.primary.verdict for arm in analysis.arms if arm.primary] == ["too few seeds"]


def test_limits_of_few_seeds(tmp_path):
    three = analyse(load_study(write_study(tmp_path / "a", losses({"gelu": 0.0, "relu": 0.0}, range(3)))))
    said = " ".join(three.limits)
    assert "permutation p cannot go below 0.1 " in said
    assert "sign-flip p cannot go below 0.25 " in said
    assert "no BCa interval" in said
    five = analyse(load_study(write_study(tmp_path / "b", losses({"gelu": 0.0, "relu": 0.0}, range(5)))))
    assert "permutation" not in " ".join(five.limits)
    assert "0.062" in " ".join(five.limits)
    assert analyse(load_study(write_study(tmp_path / "c", losses({"gelu": 0.0, "relu": 0.0}, range(6))))).limits == [
        SCOPE
    ]


def test_several_studies_in_one_report(tmp_path):
    a = write_study(tmp_path / "one", VALUES)
    b = write_grid(tmp_path / "two", 2 + 0.01 * np.random.default_rng(0).standard_normal((3, 3)))
    table = {(k, lr, s): 2 + lr + 0.01 * (s % 3) for k in ("gelu", "relu") for lr in (0.1, 0.2) for s in range(6)}
    c = write_rates(tmp_path / "three", table)
    analyses = write_report([a, b, c], out=tmp_path / "all", pictures=False)
    assert [x.study.name for x in analyses] == ["one", "two", "three"]
    text = _Text.parsed((tmp_path / "all" / "report.html").read_text())
    assert all(target[1:] in text.ids for target in text.targets)
    assert "Noise floor" in text.text
    assert "Learning rates" in text.text
    assert not (a / "report.html").exists()
    assert len(json.loads((tmp_path / "all" / "report.json").read_text())["studies"]) == 3


def test_a_study_that_has_only_started(tmp_path):
    changes = {(b, s): {"status": "missing"} for b in ("relu", "swiglu") for s in range(6)}
    changes |= {("gelu", s): {"status": "running"} for s in range(6)}
    (analysis,) = write_report([write_study(tmp_path / "s", VALUES, cell_changes=changes)])
    assert all(arm.n == 0 for arm in analysis.arms)
    assert "cannot be compared" in (tmp_path / "s" / "report.md").read_text()


def test_the_narrow_terminal_still_names_block_and_verdict(report):
    out = StringIO()
    show(analyse(load_study(report)), Console(file=out, width=80))
    assert re.search(r"^swiglu +6 +1\.\d{4} .*better *$", out.getvalue(), re.MULTILINE)
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80


def run_script(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


def test_script(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    done = run_script(folder, "--no-pictures")
    assert done.returncode == 0, done.stderr
    assert "swiglu" in done.stdout
    assert (folder / "report.html").exists()
    wrong = run_script(tmp_path / "nowhere")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: There is no folder")
    assert "Traceback" not in wrong.stderr


def test_script_refuses_unequal_data(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    path = folder / cell_name("relu", 1) / "run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps(run | {"hashes": run["hashes"] | {"data": "other"}}))
    done = run_script(folder)
    assert done.returncode == 1
    assert "cannot be compared" in done.stderr
    assert not (folder / "report.json").exists()


def test_the_scale_stands_below_the_headline(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    for path in folder.glob("*/config.yaml"):
        path.write_text(path.read_text() + "data: {kind: shakespeare}\n")
    (analysis,) = write_report([folder], pictures=False)
    said = "0.45 M parameters, 0.51 M tokens of shakespeare, 6 seeds"
    assert analysis.scale == said
    out = StringIO()
    show(analysis, Console(file=out, width=80))
    html = _Text.of((folder / "report.html").read_text())
    for text in (html, (folder / "report.md").read_text(), out.getvalue()):
        assert 0 < text.index(words.headline(analysis)[:20]) < text.index(said)


def test_what_is_resolved_needs_no_more_seeds(report):
    analysis = analyse(load_study(report))
    verdicts = {}
    for arm in analysis.arms:
        if arm.primary:
            blank = words.can_resolve(arm.primary) == words.seeds(arm.primary) == "–"
            verdicts.setdefault(arm.primary.verdict, set()).add(blank)
    assert verdicts == {"better": {True}, "not resolved": {False}}


def test_unequal_speed_is_a_problem_and_no_part_of_the_answer(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    assert analyse(load_study(folder)).problems == []
    for seed in range(6):
        path = folder / cell_name("relu", seed) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens_per_s": 4000.0}))
    (analysis,) = write_report([folder], pictures=False)
    (problem,) = analysis.problems
    assert "relu ran at 4,000 tokens/s and gelu at 16,000 for equal FLOPs" in problem.text
    (record,) = json.loads((folder / "report.json").read_text())["studies"]
    assert record["problems"] == []
    assert [said["kind"] for said in record["timing"]["problems"]] == ["speed"]
    html, markdown = _Text.of((folder / "report.html").read_text()), (folder / "report.md").read_text()
    for text in (html, markdown):
        assert words.WALL_CLOCK.lower() in text.lower()


def test_a_seed_far_out_is_named_and_counted(tmp_path):
    far = {b: dict(v) for b, v in VALUES.items()}
    near = [v for s, v in far["swiglu"].items() if s != 4]
    far["swiglu"][4] = max(near) + 0.5
    (analysis,) = write_report([write_study(tmp_path / "s", far)], pictures=False)
    assert ("swiglu", 4) in [(run.arm, run.init_seed) for run in analysis.outlying]
    assert "swiglu seed 4 (+" in words.outlying(analysis)
    assert words.outlying(analysis) in _Text.of((tmp_path / "s" / "report.html").read_text())
    assert next(arm for arm in analysis.arms if arm.name == "swiglu").n == 6
    few = {b: {s: v for s, v in by.items() if s in (3, 4, 5)} for b, by in far.items()}
    assert analyse(load_study(write_study(tmp_path / "few", few))).outlying == []


def test_the_census_table_leaves_out_variants_and_a_constant_size(tmp_path):
    folder = write_study(tmp_path / "s", VALUES)
    for path in folder.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dead/rel_n16": 0.5}))
    (analysis,) = write_report([folder], pictures=False)
    assert figure_names(analysis)[0] == "dead/exact"
    assert not {"dead/rel_n16", "census/n"} & set(figure_names(analysis))
    assert "rest on 65,536 tokens" in _Text.of((folder / "report.html").read_text())
    assert "dead/rel_n16" in (folder / "report.json").read_text()
    path = folder / cell_name("relu", 0) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"census/n": 8192}))
    assert figure_names(analyse(load_study(folder)))[-1] == "census/n"


def test_both_reports_say_how_to_read_them(report):
    text = _Text.of((report / "report.html").read_text())
    paragraphs = (report / "report.md").read_text().split("## How to read this")[1].split("## Where")[0].split("\n\n")
    said = [re.sub(r"\s+", " ", p).strip() for p in paragraphs if p.strip()]
    assert len(said) >= 5
    assert all(p in text for p in said)


def test_words():
    assert words.number(float("nan")) == "–"
    assert words.signed(-0.01) == "−0.0100"
    assert words.p_value(0.00001) == "< 0.0001"
    assert words.count(134217728) == "134.22M"
    assert words.plain("a\x1b[2Jb\nc\u202e") == "a [2Jb c "
    assert words.markdown("a|b_c<d>") == "a\\|b\\_c&lt;d&gt;"
