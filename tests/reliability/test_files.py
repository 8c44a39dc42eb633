"""Full disks, places that cannot be written, odd paths."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import TINY, Run, record, remains, train_cli

import ffnlab
from ffnlab.training.checkpoints import load_checkpoint
from ffnlab.training.ledger import read_points


def whole(run_dir: Path) -> None:
    """The ledger can be read to its last byte, and so can every checkpoint that is there."""
    record(run_dir)
    yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)
    for path in (run_dir / "checkpoints").glob("*.ckpt"):
        load_checkpoint(path)
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


def one_line(run: Run) -> str:
    assert "Traceback" not in run.said, run.said
    (line,) = [line for line in run.said.splitlines() if line.startswith("error:")]
    return line


class FilesNoLargerThan:
    """A file-size limit, from the moment the run has its first checkpoint."""

    def __init__(self, size: int, from_save: int) -> None:
        self.size, self.from_save = size, from_save

    def __call__(self) -> None:
        from ffnlab.training.checkpoints import Checkpoints

        original, saves = Checkpoints.save, [0]

        def save(self_: Checkpoints, trainer: object) -> None:
            saves[0] += 1
            if saves[0] == self.from_save:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
            original(self_, trainer)  # type: ignore[arg-type]

        Checkpoints.save = save  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("from_save", [1, 3])
def test_a_file_size_limit_ends_in_one_line_and_spoils_nothing(tmp_path: Path, from_save: int) -> None:
    run = Run(tmp_path, [*TINY, "hydra.run.dir=run"], before=FilesNoLargerThan(20_000, from_save))
    assert run.wait() == 1
    assert "while writing to run" in one_line(run)
    whole(tmp_path / "run")
    assert record(tmp_path / "run")["status"] == "failed"
    train_cli(tmp_path, ["resume=run"])
    assert record(tmp_path / "run")["status"] == "finished"


def test_a_limit_that_cuts_a_point_of_the_curve_takes_it_back(tmp_path: Path) -> None:
    """The limit is smaller than ``metrics.jsonl`` gets, so the file that grows is the one that fails."""
    train_cli(tmp_path / "free", [*TINY, "hydra.run.dir=run"])
    size = (tmp_path / "free" / "run" / "metrics.jsonl").stat().st_size
    run = Run(tmp_path, [*TINY, "hydra.run.dir=run"], before=FilesNoLargerThan(size - 700, 5))
    assert run.wait() == 1
    one_line(run)
    points = read_points(tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == len(points)
    train_cli(tmp_path, ["resume=run"])
    assert remains(tmp_path / "run")["points"] == remains(tmp_path / "free" / "run")["points"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of one megabyte, where this process may mount one; else None."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    try:
        yield disk if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("free", [0, 30_000, 300_000, 700_000])
def test_a_full_disk_ends_in_one_line_and_spoils_nothing(tmp_path: Path, small_disk: Path | None, free: int) -> None:
    """Whatever it is that does not fit any more: the ledger, a checkpoint, the census, the final weights."""
    if small_disk is None:  # no right to mount: the file-size limit above is the test
        return
    used = max(0, 1_048_576 - 4096 - free)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * used)
    run_dir = small_disk / "run"
    run = Run(tmp_path, [*TINY, f"hydra.run.dir={run_dir}"])
    assert run.wait() == 1, run.said
    assert "No space left on device" in one_line(run)
    if (run_dir / "run.json").exists():
        record(run_dir)
        points = run_dir / "metrics.jsonl"
        assert not points.exists() or len(points.read_text().splitlines()) == len(read_points(run_dir))
        for path in run_dir.glob("checkpoints/*.ckpt"):
            load_checkpoint(path)
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
        train_cli(tmp_path, [f"resume={run_dir}"])
        assert record(run_dir)["status"] == "finished"


def test_a_folder_below_a_file_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path, [*TINY, "hydra.run.dir=file/run"])
    assert run.wait() == 1
    assert "is not a folder" in one_line(run)
    assert "step" not in run.said


def test_a_read_only_place_is_said_before_anything_starts(tmp_path: Path, small_disk: Path | None) -> None:
    if small_disk is None:
        return
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = Run(tmp_path, [*TINY, f"hydra.run.dir={small_disk}/run"])
    assert run.wait() == 1
    assert "Read-only file system" in one_line(run)


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    train_cli(tmp_path, [*TINY, "train.tokens=272", "hydra.run.dir=a/b/c/run"])
    assert record(tmp_path / "a" / "b" / "c" / "run")["status"] == "finished"


@pytest.mark.parametrize("name", ["run one", "lr=3"])
def test_a_run_directory_with_a_space_or_an_equals_sign_is_refused(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, [*TINY, f"hydra.run.dir='{name}'"])
    assert run.wait() == 1
    assert "must not hold" in one_line(run)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("parent", ["with spaces in it", "größe µ 中文", 'it\'s "quoted"'])
def test_odd_parent_folders_work_and_the_command_that_is_printed_resumes(tmp_path: Path, parent: str) -> None:
    import shlex
    import signal

    from test_signals import SignalDuring

    folder = tmp_path / parent
    text = folder / "my text.txt"
    folder.mkdir()
    text.write_text("".join(f"Zeile {n} über größe.\n" for n in range(2000)), encoding="utf-8")
    data = [f'data.paths="{str(text).replace(chr(34), chr(92) + chr(34))}"', "data.tokenizer.kind=bytes"]
    args = [*TINY, "data=text", *data, "train.tokens=2560"]
    moment = SignalDuring("lightning.pytorch.trainer.trainer", "Trainer.validate", signal.SIGTERM)
    escaped = str(folder / "run").replace('"', '\\"')
    run = Run(tmp_path / "elsewhere", [*args, f'hydra.run.dir="{escaped}"'], before=moment, FFNLAB_CACHE=str(folder))
    assert run.wait() == 143, run.said
    printed = run.said.rpartition("go on by: ")[2].splitlines()[0]
    train_cli(tmp_path / "elsewhere", shlex.split(printed)[2:], FFNLAB_CACHE=str(folder))
    assert record(folder / "run")["status"] == "finished"


@pytest.mark.slow
def test_a_reader_that_leaves_stops_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(ffnlab.__file__).parents[1] / "train.py"), *TINY, "hydra.run.dir=run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert process.stderr.read() == ""
    assert record(tmp_path / "run")["status"] == "finished"
