import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import losses, write_study

ROOT = Path(__file__).parents[2]
pytest.importorskip("wandb_workspaces")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")


def run_script(tmp_path, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / "wandb_workspace.py"), *map(str, arguments)]
    env = {"PATH": "/usr/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)


def test_specification_without_a_server(tmp_path):
    folder = write_study(tmp_path / "glu", losses({"gelu": 0.0, "relu": 0.01, "swiglu": -0.06}, range(6)))
    out = tmp_path / "view.json"
    done = run_script(tmp_path, folder, "--entity", "someone", "--project", "ffnlab", "--out", out)
    assert done.returncode == 0, done.stderr
    view = json.loads(out.read_text())
    assert (view["entity"], view["project"], view["name"]) == ("someone", "ffnlab", "Study glu")
    sections = {s["name"]: s["panels"] for s in view["spec"]["section"]["panelBankConfig"]["sections"]}
    loss = sections["Loss by block"]
    assert [p["config"]["xAxis"] for p in loss[:3]] == ["step", "tokens", "flops"]
    assert {p["config"]["groupBy"] for p in loss} == {"jobType"}
    difference = sections["Difference to the baseline"]
    mean = json.loads(
        json.dumps(sum(losses({"gelu": 0.0, "relu": 0.01, "swiglu": -0.06}, range(6))["gelu"].values()) / 6)
    )
    assert difference[1]["config"]["expressions"] == [f"${{val/loss}} - {mean:.6f}"]
    assert "swiglu is better than gelu" in difference[0]["config"]["value"]
    dead = [p["config"]["metrics"] for p in sections["Dead neurons by layer"]]
    assert dead == [["dead/rel"], *([f"dead/rel_L{i}"] for i in range(4))]
    (runs,) = view["spec"]["section"]["runSets"]
    assert "glu" in json.dumps(runs["filters"])
    # the same study gives the same file
    again = tmp_path / "again.json"
    run_script(tmp_path, folder, "--entity", "someone", "--out", again)
    assert again.read_text() == out.read_text()


def test_without_a_key_it_says_so(tmp_path):
    folder = write_study(tmp_path / "glu", losses({"gelu": 0.0, "relu": 0.01}, range(3)))
    missing = run_script(tmp_path, folder)
    assert (missing.returncode, missing.stderr.startswith("error: Say whose project")) == (1, True)
    done = run_script(tmp_path, folder, "--entity", "someone")
    assert done.returncode == 1
    assert "error: W&B did not take the view" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_study_without_results_has_no_difference_panel(tmp_path):
    from ffnlab.study import workspace
    from ffnlab.study.analyse import analyse
    from ffnlab.study.load import load_study

    changes = {(b, s): {"status": "missing"} for b in ("gelu", "relu") for s in range(3)}
    folder = write_study(tmp_path / "s", losses({"gelu": 0.0, "relu": 0.01}, range(3)), cell_changes=changes)
    analysis = analyse(load_study(folder))
    spec = workspace.specification(workspace.build_workspace(analysis, "e", "p", workspace.count_layers(analysis)))
    assert "expressions" not in json.dumps(spec)
