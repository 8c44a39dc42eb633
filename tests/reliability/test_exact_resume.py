"""A run killed at any moment and started again ends as one that never was: bit for bit."""

import os
import random
import signal
from pathlib import Path

import pytest
from processes import TINY, Run, record, remains, steps_logged, train_cli, until

from ffnlab.training.checkpoints import load_checkpoint
from ffnlab.training.ledger import read_points

# every source of randomness at once; a step in two parts
LIVELY = [
    *TINY,
    "ffn.dropout_hidden=0.2",
    "ffn.dropout_output=0.1",
    "model.dropout_attention=0.1",
    "model.dropout_embedding=0.1",
    "trainer.accumulate_grad_batches=2",
    "train.tokens=13600",  # 100 steps
    "optim.lr=3e-2",  # so that the validation loss goes up and down, and best is not always last
]
KILLS = 10


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_cli(folder, [*LIVELY, "hydra.run.dir=run"])
    return folder / "run"


def kill_after(run: Run, run_dir: Path, sitting: int, steps: int) -> int:
    """Kill the run at least ``steps`` steps into its ``sitting``; its exit code."""

    def far_enough() -> bool:
        if not run.running or not (run_dir / "run.json").exists():
            return not run.running
        resumed = record(run_dir).get("resumed", [])
        start = resumed[-1]["step"] if resumed else 0
        return len(resumed) == sitting and steps_logged(run_dir) >= start + steps

    until(far_enough)
    run.send(signal.SIGKILL)
    return run.wait()


@pytest.mark.slow
def test_ten_kills_at_random_steps_change_nothing(uninterrupted: Path, tmp_path: Path) -> None:
    chance = random.Random(20261130)
    args = [*LIVELY, "hydra.run.dir=run"]
    for sitting in range(KILLS):
        code = kill_after(Run(tmp_path, args), tmp_path / "run", sitting, steps=chance.randint(0, 14))
        assert code == -signal.SIGKILL
        args = ["resume=run"]
    train_cli(tmp_path, args)
    sittings = record(tmp_path / "run")["resumed"]
    assert len(sittings) == KILLS
    assert sittings[-1]["step"] > 0, "no kill came after a checkpoint"
    resumed, whole = remains(tmp_path / "run"), remains(uninterrupted)
    for what in whole:
        assert resumed[what] == whole[what], what


class Killed:
    """Kills the process in the middle of ``method`` of ``target``, the nth time it gets there."""

    def __init__(self, module: str, name: str, nth: int, after: bool) -> None:
        self.module, self.name, self.nth, self.after = module, name, nth, after

    def __call__(self) -> None:
        import importlib

        owner = importlib.import_module(self.module)
        *path, method = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, method)
        calls = [0]

        def killing(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] == self.nth and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if calls[0] == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, method, killing)


WORST_MOMENTS = {
    "the directory is claimed and holds nothing else": Killed("ffnlab.training.ledger", "Ledger.update", 1, False),
    "a checkpoint is written but not in place": Killed("ffnlab.training.checkpoints", "write_flushed", 3, True),
    "the best is in place and the last is not": Killed("ffnlab.training.checkpoints", "_replace_by_link", 2, True),
    "validation is logged and not yet saved": Killed("ffnlab.training.checkpoints", "Checkpoints.save", 4, False),
    "the final validation is logged": Killed("ffnlab.training.run", "_save_weights", 1, False),
    "the result is written and the status is not": Killed("ffnlab.training.ledger", "Ledger.update", 2, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", WORST_MOMENTS)
def test_a_kill_at_the_worst_moment_changes_nothing(uninterrupted: Path, tmp_path: Path, moment: str) -> None:
    run = Run(tmp_path, [*LIVELY, "hydra.run.dir=run"], before=WORST_MOMENTS[moment])
    assert run.wait() == -signal.SIGKILL, run.said
    train_cli(tmp_path, ["resume=run"])
    assert record(tmp_path / "run")["status"] == "finished"
    resumed, whole = remains(tmp_path / "run"), remains(uninterrupted)
    for what in whole:
        assert resumed[what] == whole[what], what


def test_each_point_is_there_once(uninterrupted: Path) -> None:
    points = [(p["step"], name) for p in read_points(uninterrupted) for name in p if "/" in name]
    assert len(points) == len(set(points))
    assert {step for step, name in points if name == "val/loss"} == {*range(0, 101, 10)}
    assert {step for step, name in points if name == "train/loss"} == {*range(3, 100, 3), 100}


def test_checkpoints_remember_plain_values_only(uninterrupted: Path) -> None:
    content = load_checkpoint(uninterrupted / "checkpoints" / "last.ckpt")  # weights_only=True
    assert "hyper_parameters" not in content
    assert content["global_step"] == 100


def test_a_resume_takes_no_other_configuration(uninterrupted: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, [f"resume={uninterrupted}", "optim.lr=1"])
    assert run.wait() == 1
    assert "leave out optim.lr=1" in run.said


def test_a_finished_run_is_not_run_again(uninterrupted: Path, tmp_path: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    run = train_cli(tmp_path, [f"resume={uninterrupted}"])
    assert "is finished already" in run.said
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before
