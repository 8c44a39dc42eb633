"""The view of a study that runs, stands still, or is done."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import BASIC, TINY, statuses

from ffnlab.study.cells import cell_lock
from ffnlab.study.progress import CellProgress, duration, survey, time_left
from ffnlab.study.runner import run_study

COMMAND = [BASIC, "ffn=relu,gelu", "seed=0,1", "study=s", *TINY]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cells finished, one half done, one failed, one never begun."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_study(COMMAND) == 0
    study = folder / "outputs" / "s"
    *_, half, failed = statuses(study)
    record = json.loads((study / half / "run.json").read_text())
    (study / half / "run.json").write_text(json.dumps(record | {"status": "running"}))
    (study / half / "result.json").unlink()
    lines = (study / half / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= 15]
    (study / half / "metrics.jsonl").write_text("\n".join(kept) + '\n{"step": 16, "sec')  # a line being written
    (study / failed / "result.json").unlink()
    manifest = json.loads((study / "study.json").read_text())
    manifest["cells"][half] |= {"status": "running", "result": None}
    manifest["cells"][failed] |= {"status": "failed", "result": None, "error": "RuntimeError: no"}
    manifest["cells"]["gelu-s9-00000000"] = {**manifest["cells"][half], "status": "pending", "seed": 9}
    (study / "study.json").write_text(json.dumps(manifest))
    return study


def test_the_state_of_every_cell(study: Path) -> None:
    cells = survey(study)
    assert [cell.status for cell in cells] == ["finished", "finished", "stopped", "failed", "waiting"]
    half = cells[2]
    assert (half.step, half.steps) == (15, 20)
    assert half.left == pytest.approx(half.seconds / 15 * 5)
    assert cells[3].error == "RuntimeError: no"


def test_a_cell_runs_while_a_process_holds_it(study: Path) -> None:
    half = survey(study)[2]
    with cell_lock(study, half.name):
        assert survey(study)[2].status == "running"
    assert survey(study)[2].status == "stopped"


def test_the_script_shows_it(study: Path, run_script) -> None:
    done = run_script("scripts/status.py", str(study), COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert "s: 5 cells, 2 finished, 1 stopped, 1 failed, 1 waiting" in done.stdout
    assert "15 of 20" in done.stdout
    assert "RuntimeError: no" in done.stdout
    assert "relu" in done.stdout
    assert "2 of 2" in done.stdout
    watched = run_script("scripts/status.py", str(study), "--watch", "0.2")  # nothing runs: it ends by itself
    assert watched.returncode == 0
    assert "5 cells" in watched.stdout


def test_no_study_there(tmp_path: Path, run_script) -> None:
    done = run_script("scripts/status.py", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} is no study")
    assert "Traceback" not in done.stderr


def test_time_left_is_shared_by_the_cells_that_run() -> None:
    def cell(status: str, seconds: float, left: float | None) -> CellProgress:
        return CellProgress("x", "relu", status, 1, 2, seconds, left, None, "")

    running, finished, waiting = cell("running", 60, 40), cell("finished", 100, None), cell("waiting", 0, None)
    assert time_left([running, finished]) == 40
    assert time_left([running, running, waiting, waiting]) == pytest.approx((40 + 40 + 100 + 100) / 2)
    assert time_left([finished, waiting]) is None
    assert time_left([cell("running", 0, None)]) is None
    assert [duration(s) for s in (12, 600, 7500)] == ["12 s", "10 min", "2 h 05 min"]


def test_looking_needs_neither_torch_nor_a_configuration() -> None:
    code = "import sys, ffnlab.study.progress; print([m for m in ('torch', 'lightning', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("bad", ["null", '"2"', "[]", "1e999"])
def test_a_damaged_cell_is_shown_as_such_and_a_damaged_point_is_passed_over(study: Path, bad: str) -> None:
    half = survey(study)[2]
    points, record = study / half.name / "metrics.jsonl", study / half.name / "run.json"
    kept = points.read_text(), record.read_text()
    try:
        points.write_text(f'{kept[0]}\n{{"step": 17, "seconds": {bad}}}\n{{"step": {bad}, "seconds": 3.0}}\n')
        assert survey(study)[2].step == 15
        record.write_text("{}")
        cell = survey(study)[2]
        assert (cell.status, cell.error) == ("damaged", f"{record}: status is missing")
    finally:
        points.write_text(kept[0])
        record.write_text(kept[1])
