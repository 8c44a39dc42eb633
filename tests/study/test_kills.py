"""Studies in real processes that are killed, stopped, and started side by side."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import BASIC, TIMINGS, TINY, Command, manifest, results, statuses

from ffnlab.study.report import write_report
from ffnlab.training.ledger import read_points

pytestmark = pytest.mark.slow  # real processes
STUDY = [BASIC, "ffn=relu,swiglu", "seed=0,1", "study=s", *TINY]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *STUDY[1:]]


def until(condition: Callable[[], bool], patience: float = 300) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def points_logged(study_dir: Path) -> int:
    return sum(len(read_points(path.parent)) for path in study_dir.glob("*/metrics.jsonl"))


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked about since it ended does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def curves(study_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.parent.name: [{k: v for k, v in point.items() if k not in TIMINGS} for point in read_points(path.parent)]
        for path in study_dir.glob("*/metrics.jsonl")
    }


def report(study_dir: Path, out: Path) -> list[dict[str, Any]]:
    """The content of report.json without what depends on how fast the machine was."""
    write_report([study_dir], out, pictures=False)
    studies = json.loads((out / "report.json").read_text(encoding="utf-8"))["studies"]
    return [{key: value for key, value in study.items() if key != "timing"} for study in studies]


def run(folder: Path, args: list[str], **env: str) -> Command:
    command = Command(folder, ["-m", *args], **env)
    assert command.wait() == 0, command.said
    return command


def kill_at(folder: Path, args: list[str], points: int) -> None:
    """SIGKILL the command once so many points are logged in all."""
    command = Command(folder, ["-m", *args])
    until(lambda: points_logged(folder / "outputs" / "s") >= points or not command.running)
    command.send(signal.SIGKILL)
    command.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, STUDY)
    return folder / "outputs" / "s"


def test_killed_again_and_again_a_study_ends_as_if_undisturbed(tmp_path: Path, undisturbed: Path) -> None:
    total = points_logged(undisturbed)
    for points in sorted(random.Random(5).sample(range(1, total - 5), 5)):
        kill_at(tmp_path, STUDY, points)
    study = tmp_path / "outputs" / "s"
    assert any(status != "finished" for status in statuses(study).values())
    command = run(tmp_path, STUDY)
    assert "goes on" in command.said
    assert results(study) == results(undisturbed)
    assert curves(study) == curves(undisturbed)
    assert report(study, tmp_path / "report") == report(undisturbed, tmp_path / "undisturbed")


def test_an_interrupted_study_saves_and_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    study = tmp_path / "outputs" / "s"
    command = Command(tmp_path, ["-m", *STUDY])
    until(lambda: points_logged(study) >= 30)
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.said
    assert "the same command goes on" in command.said
    assert "interrupted" in statuses(study).values()
    assert "pending" in statuses(study).values()  # no other cell was begun
    assert not list((study / ".locks").glob("stop-*"))
    assert all((study / name / "run.json").exists() for name in statuses(study) if (study / name).exists())
    run(tmp_path, STUDY)
    assert results(study) == results(undisturbed)


def test_joblib_workers_end_with_a_killed_command_and_the_study_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    study = tmp_path / "outputs" / "s"
    for points in (5, 60):
        command = Command(tmp_path, ["-m", *JOBLIB])
        until(lambda points=points, command=command: points_logged(study) >= points or not command.running)
        workers = {entry["pid"] for entry in manifest(study)["cells"].values() if "pid" in entry}
        command.send(signal.SIGKILL)
        command.wait()
        until(lambda workers=workers: not any(alive(pid) for pid in workers))
    run(tmp_path, JOBLIB)
    # Two at a time in processes that are used again: the same numbers as one after the other.
    assert results(study) == results(undisturbed)
    assert {json.loads(path.read_text())["hardware"]["threads"] for path in study.glob("*/run.json")} == {1}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_all_processes_saves_every_cell(tmp_path: Path, undisturbed: Path, signum: int, code: int) -> None:
    """One of three workers has nothing to do."""
    study = tmp_path / "outputs" / "s"
    cells = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=3", "ffn=relu", *STUDY[2:]]
    command = Command(tmp_path, ["-m", *cells])
    until(lambda: len(list(study.glob("*/metrics.jsonl"))) == 2 or not command.running)
    command.send_to_all(signum)
    assert command.wait() == code, command.said
    # joblib's tracker of shared memory dies with a terminal that closes, and complains where nobody reads it any more.
    assert signum == signal.SIGHUP or "Traceback" not in command.said
    assert "stopped and saved" in command.said
    assert "the same command goes on" in command.said
    assert set(statuses(study).values()) <= {"interrupted", "finished"}
    assert not list((study / ".locks").glob("stop-*"))
    run(tmp_path, cells)
    expected = {name: result for name, result in results(undisturbed).items() if name in statuses(study)}
    assert results(study) == expected


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_a_cell_finishes_stops_the_study_after_it(tmp_path: Path, signum: int) -> None:
    study = tmp_path / "outputs" / "s"
    command = Command(tmp_path, ["-m", *STUDY], before=SignalAsItFinishes(signum))
    assert command.wait() == 128 + signum, command.said
    assert sorted(statuses(study).values()) == ["finished", "pending", "pending", "pending"]


class StopLeftBehind:
    """The request of a command that was killed and had this process's number, as happens in containers."""

    def __call__(self) -> None:
        from ffnlab.study.worker import Leader, ask_to_stop

        Path("outputs/s/.locks").mkdir(parents=True)
        ask_to_stop(Path("outputs/s"), Leader.here(), signal.SIGTERM)


def test_a_stop_that_was_asked_of_another_command_stops_nobody(tmp_path: Path) -> None:
    command = Command(tmp_path, ["-m", BASIC, "ffn=relu", "seed=0", "study=s", *TINY], before=StopLeftBehind())
    assert command.wait() == 0, command.said


class SignalAsItFinishes:
    """Sends this process a signal while a result is written, which nothing stops."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __call__(self) -> None:
        from ffnlab.training.ledger import Ledger

        finish = Ledger.finish

        def signalled(ledger: Ledger, result: Any) -> None:
            os.kill(os.getpid(), self.signum)
            finish(ledger, result)

        Ledger.finish = signalled  # type: ignore[method-assign,assignment]


def test_two_commands_for_one_study_share_the_work(tmp_path: Path, undisturbed: Path) -> None:
    study = tmp_path / "outputs" / "s"
    first = Command(tmp_path / "a", ["-m", f"hydra.sweep.dir={study}", *STUDY])
    second = Command(tmp_path / "b", ["-m", f"hydra.sweep.dir={study}", *STUDY])
    assert first.wait() == 0, first.said
    assert second.wait() == 0, second.said
    assert results(study) == results(undisturbed)
    starts = re.findall(r"(\S+): (?:starts|goes on)", first.said + second.said)
    assert sorted(starts) == sorted(results(study))  # each cell once


def test_two_studies_at_once_on_the_same_data(tmp_path: Path, text_file: Path) -> None:
    """Neither corpus nor tokens exist beforehand: both prepare them."""
    args = [word for word in TINY if not word.startswith(("data", "model.context"))]
    args += [f"data.paths=['{text_file}']", "data=text", "data.tokenizer.vocab_size=300", "model.context_length=16"]
    cache = str(tmp_path / "cache")
    both = [
        Command(tmp_path / name, ["-m", BASIC, "ffn=relu", "seed=0,1", f"study={name}", *args], FFNLAB_CACHE=cache)
        for name in ("one", "two")
    ]
    for command in both:
        assert command.wait() == 0, command.said
    assert results(tmp_path / "one" / "outputs" / "one") == results(tmp_path / "two" / "outputs" / "two")
