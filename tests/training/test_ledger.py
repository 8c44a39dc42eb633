"""The ledger: whole lines, whole files, each point once."""

import json
import math
from pathlib import Path

import pytest
import yaml

from ffnlab import records
from ffnlab.errors import UserError
from ffnlab.training.ledger import Ledger, alone_in, finished_result, read_points, write_atomically


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "run", 100, {"seed": 0, "path": "ä b"}, {"block": "gelu"})


def test_a_new_ledger_says_what_it_is(ledger: Ledger) -> None:
    record = records.read(ledger.run_dir / "run.json")
    assert record["status"] == "running"
    assert record["block"] == "gelu"
    assert yaml.safe_load((ledger.run_dir / "config.yaml").read_text("utf-8")) == {"seed": 0, "path": "ä b"}


def test_a_directory_belongs_to_one_run(ledger: Ledger) -> None:
    with pytest.raises(UserError, match="holds a run already; go on with it by resume="):
        Ledger.create(ledger.run_dir, 100, {}, {})
    assert records.read(ledger.run_dir / "run.json")["block"] == "gelu"  # and is left as it was


def test_points_carry_the_axes_and_no_value_breaks_json(ledger: Ledger) -> None:
    ledger.log_metrics({"train/loss": 1.5, "bad": math.nan}, step=3)
    [line] = (ledger.run_dir / "metrics.jsonl").read_text().splitlines()
    point = json.loads(line)
    assert (point["step"], point["tokens"], point["train/loss"], point["bad"]) == (3, 300, 1.5, None)
    assert point["seconds"] >= 0


def test_reopening_drops_later_points_and_a_torn_tail(ledger: Ledger) -> None:
    for step in range(5):
        ledger.log_metrics({"train/loss": float(step)}, step=step)
    path = ledger.run_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5, "tok')
    assert [p["step"] for p in read_points(ledger.run_dir)] == [0, 1, 2, 3, 4]
    again = Ledger.reopen(ledger.run_dir, 100, step=2, points=3)
    again.log_metrics({"train/loss": 3.0}, step=3)
    assert [p["step"] for p in read_points(ledger.run_dir)] == [0, 1, 2, 3]
    assert records.read(ledger.run_dir / "run.json")["resumed"][0]["step"] == 2
    assert again.seconds >= again.elapsed > 0


def test_finishing_writes_the_result_last(ledger: Ledger) -> None:
    ledger.finish({"val/loss": 2.0})
    assert records.read(ledger.run_dir / "result.json") == {"val/loss": 2.0}
    assert records.read(ledger.run_dir / "run.json")["status"] == "finished"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "spoiled", ['{"step": null}', '{"step": "2"}', '{"step": 2, "seconds": []}', "[2]", '{"step": 1e999}']
)
def test_nothing_after_a_damaged_point_is_trusted(ledger: Ledger, spoiled: str) -> None:
    for step in range(5):
        ledger.log_metrics({"train/loss": 1.0}, step=step)
    path = ledger.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], spoiled, *lines[3:]]) + "\n")
    assert [point["step"] for point in read_points(ledger.run_dir)] == [0, 1]


def test_a_result_that_holds_nothing_is_no_finished_run(ledger: Ledger) -> None:
    assert finished_result(ledger.run_dir) is None
    (ledger.run_dir / "result.json").write_text("{}")
    with pytest.raises(UserError, match="must hold val/loss"):
        finished_result(ledger.run_dir)


def test_points_that_a_checkpoint_counted_and_are_gone_stop_a_resume(ledger: Ledger) -> None:
    for step in range(3):
        ledger.log_metrics({"train/loss": 1.0}, step=step)
    Ledger.reopen(ledger.run_dir, 1024, step=2, points=3)
    (ledger.run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="up to point 0, and the checkpoint of step 2 comes after point 3"):
        Ledger.reopen(ledger.run_dir, 1024, step=2, points=3)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with alone_in(run_dir), pytest.raises(UserError, match="another process is running"), alone_in(run_dir):
        pass
    with alone_in(tmp_path / "run"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the run directory"), alone_in(tmp_path / "file" / "run"):
        pass
