"""Signals save first and stop then; what a scheduler and a person at the keyboard see."""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import TINY, Run, record, remains, steps_logged, train_cli, until

import ffnlab
from ffnlab.training.checkpoints import load_checkpoint

LONG = [*TINY, "train.tokens=136000", "hydra.run.dir=run"]  # 1000 steps: nobody waits for its end
ROOT = Path(ffnlab.__file__).parents[1]


def training(run: Run, run_dir: Path, step: int = 4) -> Callable[[], bool]:
    return lambda: steps_logged(run_dir) >= step or not run.running


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)],
    ids=lambda v: str(v),
)
def test_a_signal_saves_says_so_and_stops(tmp_path: Path, signum: int, code: int) -> None:
    run = Run(tmp_path, LONG)
    until(training(run, tmp_path / "run"))
    run.send(signum)
    assert run.wait() == code, run.said
    assert re.search(r"go on by: \S*python\S* \S*train.py resume=run\n", run.said), run.said
    assert "Traceback" not in run.said
    content = record(tmp_path / "run")
    assert content["status"] == "interrupted"
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert saved["global_step"] >= 3  # of the step at which it stopped, not of the last validation
    assert steps_logged(tmp_path / "run") <= saved["global_step"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    args = [*TINY, "ffn.dropout_hidden=0.2", "trainer.accumulate_grad_batches=2", "hydra.run.dir=run"]
    train_cli(tmp_path / "whole", args)
    run = Run(tmp_path / "cut", args)
    until(training(run, tmp_path / "cut" / "run", 13))
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    train_cli(tmp_path / "cut", ["resume=run"])
    resumed, whole = remains(tmp_path / "cut" / "run"), remains(tmp_path / "whole" / "run")
    for what in whole:
        assert resumed[what] == whole[what], what


class StuckInAStep:
    """A training step that does not end."""

    def __call__(self) -> None:
        import time

        from ffnlab.training.module import LMModule

        def step(self: object, batch: object, batch_idx: int) -> None:
            Path("stuck").touch()
            while True:
                time.sleep(0.01)

        LMModule.training_step = step  # type: ignore[method-assign,assignment]


def test_a_second_ctrl_c_quits_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, LONG, before=StuckInAStep())
    until((tmp_path / "stuck").exists)
    run.send(signal.SIGINT)
    until(lambda: "Ctrl-C again quits at once" in run.said)
    assert run.running
    run.send(signal.SIGINT)
    assert run.wait(20) == 130


class IgnoringHangups:
    """What ``nohup`` does."""

    def __call__(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [*TINY, "hydra.run.dir=run"], before=IgnoringHangups())
    until(training(run, tmp_path / "run"))
    run.send(signal.SIGHUP)
    assert run.wait() == 0, run.said
    assert record(tmp_path / "run")["status"] == "finished"


class SignalDuring:
    """Sends this process a signal when ``name`` is called, which is before or after the steps."""

    def __init__(self, module: str, name: str, signum: int) -> None:
        self.module, self.name, self.signum = module, name, signum

    def __call__(self) -> None:
        import importlib

        owner = importlib.import_module(self.module)
        *path, method = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, method)

        def signalled(*args: object, **kwargs: object) -> object:
            os.kill(os.getpid(), self.signum)
            return original(*args, **kwargs)

        setattr(owner, method, signalled)


@pytest.mark.parametrize(
    ("moment", "status"),
    [
        (SignalDuring("ffnlab.cli", "_run", signal.SIGTERM), None),
        (SignalDuring("ffnlab.training.run", "prepare_run", signal.SIGTERM), None),
        (SignalDuring("ffnlab.training.run", "open_wandb", signal.SIGTERM), "interrupted"),
        (SignalDuring("ffnlab.training.module", "LMModule.validation_step", signal.SIGTERM), "interrupted"),
    ],
    ids=["loading libraries", "preparing the data", "starting W&B", "the first validation"],
)
def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path, moment: SignalDuring, status: str) -> None:
    run = Run(tmp_path, LONG, before=moment)
    assert run.wait() == 143, run.said
    assert "Traceback" not in run.said
    assert status is None or record(tmp_path / "run")["status"] == status
    assert (tmp_path / "run").exists() == (status is not None)


@pytest.mark.parametrize(
    "moment",
    [
        SignalDuring("ffnlab.training.run", "_save_weights", signal.SIGTERM),
        SignalDuring("lightning.pytorch.trainer.trainer", "Trainer.validate", signal.SIGTERM),
    ],
    ids=["saving the final weights", "the final validation"],
)
def test_after_the_last_step_the_end_is_repeated(tmp_path: Path, moment: SignalDuring) -> None:
    run = Run(tmp_path, [*TINY, "hydra.run.dir=run"], before=moment)
    assert run.wait() == 143, run.said
    assert record(tmp_path / "run")["status"] == "interrupted"
    train_cli(tmp_path, ["resume=run"])
    assert record(tmp_path / "run")["status"] == "finished"


class SignalInTheLastPicture:
    """A library that makes something else of an interruption (or nothing), as C extensions do while they load."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def __call__(self) -> None:
        from ffnlab.census import callback

        def draw(*args: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as interruption:
                if self.error is not None:
                    raise ImportError(self.error) from interruption

        callback.draw = draw


@pytest.mark.parametrize("error", ["initialization failed", None])
def test_an_interruption_that_a_library_takes_for_a_failure_is_none(tmp_path: Path, error: str | None) -> None:
    run = Run(tmp_path, [*TINY, "hydra.run.dir=run"], before=SignalInTheLastPicture(error))
    assert run.wait() == 143, run.said
    assert "Traceback" not in run.said
    assert record(tmp_path / "run")["status"] == "interrupted"
    train_cli(tmp_path, ["resume=run"])
    assert record(tmp_path / "run")["status"] == "finished"


def test_a_signal_while_the_result_is_written_changes_nothing(tmp_path: Path) -> None:
    train_cli(
        tmp_path,
        [*TINY, "hydra.run.dir=run"],
        before=SignalDuring("ffnlab.training.ledger", "Ledger.finish", signal.SIGTERM),
    )
    assert record(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_a_run_that_runs_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, LONG)
    until(training(run, tmp_path / "run"))
    second = Run(tmp_path / "second", [f"resume={tmp_path}/run"])
    assert second.wait() == 1, second.said
    assert second.said == f"error: another process is running {tmp_path}/run now\n"
    run.send(signal.SIGKILL)
    run.wait()
    third = Run(tmp_path, ["resume=run"])  # a lock does not outlive its process
    until(lambda: "going on from step" in third.said or not third.running)
    third.send(signal.SIGTERM)
    assert third.wait() == 143, third.said


@pytest.mark.parametrize(("signum", "asked"), [(signal.SIGUSR1, "requeue 4711\n"), (signal.SIGTERM, "")])
def test_slurms_warning_puts_the_job_back_into_the_queue(tmp_path: Path, signum: int, asked: str) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
    run = Run(tmp_path, LONG, PATH=path, SLURM_JOB_ID="4711")
    until(training(run, tmp_path / "run"))
    run.send(signum)
    assert run.wait() == 143, run.said
    asked_for = tmp_path / "asked"
    assert (asked_for.read_text() if asked_for.exists() else "") == asked
    assert record(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.slow
def test_the_script_itself_exits_as_the_shell_expects(tmp_path: Path) -> None:
    """The same through a fresh interpreter, as typed."""
    command = [sys.executable, str(ROOT / "train.py"), *LONG]
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        until(lambda: steps_logged(tmp_path / "run") >= 3 or process.poll() is not None, patience=120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, (tmp_path / "output.txt").read_text()
    assert record(tmp_path / "run")["status"] == "interrupted"
