"""Two processes on the CPU train what one trains, and leave one run behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import TINY, Run, record, steps_logged, train_cli, until

import ffnlab
from ffnlab.census.table import read
from ffnlab.training.ledger import read_points

ROOT = Path(ffnlab.__file__).parents[1]
SHORT = [*TINY, "train.tokens=2720", "hydra.run.dir=run"]  # 20 steps
# the second process starts itself by the command line, as it would for a user
OFFLINE = {"WANDB_MODE": "offline"}


def start(folder: Path, args: list[str], log: str = "output.txt") -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    import os

    env = os.environ | {"OMP_NUM_THREADS": "1"} | OFFLINE
    with (folder / log).open("wb") as output:
        command = [sys.executable, str(ROOT / "train.py"), *args]
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=env)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train_cli(folder, SHORT)
    return folder / "run"


def same_figures(run_dir: Path, alone: Path) -> None:
    """Every logged figure of every point, to float tolerance; and the census table."""
    points, wanted = read_points(run_dir), read_points(alone)
    assert [set(p) for p in points] == [set(p) for p in wanted]
    for point, want in zip(points, wanted, strict=True):
        for name in point.keys() - {"seconds", "tokens_per_s"}:
            assert point[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), (name, want["step"])
    for point, want in zip(points, wanted, strict=True):
        for name in ("train/loss", "val/loss", "final/loss"):
            if name in point:
                assert point[name] == pytest.approx(want[name], rel=1e-5), (name, want["step"])
    table, whole = read(run_dir / "census.parquet"), read(alone / "census.parquet")
    assert {name: len(column) for name, column in table.items()} == {name: len(c) for name, c in whole.items()}


def result(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return content


@pytest.mark.slow
def test_ddp_is_one_run_with_the_same_losses(tmp_path: Path, alone: Path) -> None:
    process = start(tmp_path, [*SHORT, "trainer=ddp", "trainer.devices=2", "logger=wandb"])
    assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    said = (tmp_path / "output.txt").read_text()
    same_figures(tmp_path / "run", alone)
    assert result(tmp_path / "run")["val/tokens"] == result(alone)["val/tokens"]
    # one of each: directory, ledger, W&B run, face
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt", "run"]
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1
    assert said.count("run       run") == 1
    assert record(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_ddp_when_one_process_has_no_validation_batch(tmp_path: Path) -> None:
    """Buffers (rotary angles, masks) must not be sent around in a pass that the other process does not make."""
    process = start(
        tmp_path, [*SHORT, "model.positions=rope", "train.val_tokens=1", "trainer=ddp", "trainer.devices=2"]
    )
    try:
        assert process.wait(200) == 0, (tmp_path / "output.txt").read_text()
    finally:
        process.kill()
    assert record(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_model_parallel_matches_one_process_and_resumes(tmp_path: Path, alone: Path) -> None:
    process = start(tmp_path, [*SHORT, "trainer=model_parallel"])
    until(lambda: steps_logged(tmp_path / "run") >= 12 or process.poll() is not None, patience=200)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143, (tmp_path / "output.txt").read_text()
    assert record(tmp_path / "run")["status"] == "interrupted"
    process = start(tmp_path, ["resume=run"], "resumed.txt")
    assert process.wait(300) == 0, (tmp_path / "resumed.txt").read_text()
    assert record(tmp_path / "run")["resumed"][0]["step"] >= 10
    same_figures(tmp_path / "run", alone)
    assert result(tmp_path / "run")["val/tokens"] == result(alone)["val/tokens"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trainer=fsdp"], "trainer=fsdp needs GPUs"),
        (["trainer=ddp", "trainer.devices=3"], "must be a multiple of"),
        (["trainer=model_parallel", "ffn.dropout_hidden=0.1"], "needs ffn.dropout_hidden=0"),
        (["trainer=model_parallel", "trainer.devices=3"], "cannot cut d_ff=64 into 3 equal parts"),
        (["trainer=model_parallel", "ffn=swish", "ffn.learn_beta=true", "budget.tolerance=1"], "cannot cut DenseFFN"),
        (["trainer=model_parallel", "trainer.precision=64-true"], "lightning.Trainer refuses"),
        (["trainer.precision=17"], "lightning.Trainer refuses"),
        (["trainer.accelerator=abacus"], "lightning.Trainer refuses"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_shared_out_is_refused_before_anything_is_written(
    tmp_path: Path, args: list[str], says: str
) -> None:
    run = Run(tmp_path, [*SHORT, *args])
    assert run.wait() == 1
    assert says in run.said
    assert "Traceback" not in run.said
    assert not (tmp_path / "run").exists()
