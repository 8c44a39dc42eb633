"""Running and resuming studies, in this process."""

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import BASIC, TINY, manifest, results, statuses

from ffnlab.config import StudyConfig, compose
from ffnlab.errors import UserError
from ffnlab.study.cells import Cell, State, cell_lock, cell_name, is_running, look, put_aside
from ffnlab.study.manifest import declare, update_cell
from ffnlab.study.runner import _launch_all, run_study
from ffnlab.study.sweep import make_cells, take_apart

TINY_BUT_BATCH = [word for word in TINY if not word.startswith(("train.batch_size", "optim.warmup"))]
STUDY = [BASIC, "ffn=relu,swiglu", "seed=0,1", "study=s", *TINY]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of four cells; copied by tests that change it."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run_study(STUDY) == 0
    return place / "outputs" / "s"


@pytest.fixture
def study(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder / "outputs" / "s")
    return folder / "outputs" / "s"


@pytest.fixture
def own_block(folder: Path) -> Iterator[Path]:
    """A folder of groups with a block of the user's own, ``ffn=mine``, that behaves as its options say."""
    (folder / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        class Mine(nn.Module):
            def __init__(self, d_model, d_ff, width=0, breaks_at=-1, value=1.0):
                super().__init__()
                self.up = nn.Linear(d_model, d_ff, bias=False)
                self.down = nn.Linear(d_ff, d_model, bias=False)
                self.width, self.breaks_at, self.calls, self.value = width, breaks_at, 0, value

            def forward(self, x):
                if self.training:
                    self.calls += 1
                if self.calls == self.breaks_at:
                    raise RuntimeError("the block broke\\nin a second line")
                h = torch.relu(self.up(x))
                return self.down(h[..., self.width:] * self.value)
        """)
    )
    (folder / "groups" / "ffn").mkdir(parents=True)
    (folder / "groups" / "ffn" / "mine.yaml").write_text("_target_: mine.Mine\nwidth: 0\nbreaks_at: -1\nvalue: 1.0\n")
    sys.path.insert(0, str(folder))
    yield folder / "groups"
    sys.path.remove(str(folder))
    sys.modules.pop("mine", None)


def test_a_study_is_a_folder_with_a_cell_each_and_a_manifest(finished: Path) -> None:
    record = manifest(finished)
    assert record["study"] == "s"
    assert record["analysis"] == "unpaired"
    assert record["baseline"] == "relu"  # no gelu: the first
    assert set(statuses(finished).values()) == {"finished"}
    names = list(record["cells"])
    assert [re.sub(r"-[0-9a-f]{8}$", "", name) for name in names] == ["relu-s0", "relu-s1", "swiglu-s0", "swiglu-s1"]
    visible = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert visible == {*names, "study.json"}  # no numbered folders, no multirun.yaml
    first = record["cells"][names[0]]
    assert first["overrides"][:2] == ["ffn=relu", "seed=0"]
    assert not any(o.startswith(("study=", "hydra")) for o in first["overrides"])
    assert first["seconds"] > 0
    assert len(results(finished)) == 4


def test_the_same_command_skips_what_is_finished(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in study.glob("*/*.json")}
    assert run_study(STUDY) == 0
    said = capsys.readouterr().out
    assert said.count("finished before, val/loss") == 4
    assert "starts" not in said
    assert {path: path.stat().st_mtime_ns for path in study.glob("*/*.json")} == before


def test_a_half_done_cell_goes_on_from_its_checkpoint(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = results(study)
    name = next(iter(expected))
    (study / name / "result.json").unlink()
    record = json.loads((study / name / "run.json").read_text())
    (study / name / "run.json").write_text(json.dumps(record | {"status": "running"}))
    last = torch.load(study / name / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 20
    # as after a kill at step 12 or so: the checkpoint before is the newest
    shutil.move(study / name / "checkpoints" / "previous.ckpt", study / name / "checkpoints" / "last.ckpt")
    assert run_study(STUDY) == 0
    said = capsys.readouterr().out
    assert f"{name}: goes on" in said
    assert said.count("finished before") == 3
    assert json.loads((study / name / "run.json").read_text())["resumed"][0]["step"] == 15
    assert results(study) == expected


def test_records_that_a_kill_cut_short_start_the_cell_afresh(study: Path) -> None:
    expected = results(study)
    name = next(iter(expected))
    (study / name / "result.json").unlink()
    (study / name / "run.json").write_text("")
    assert run_study(STUDY) == 0
    assert results(study) == expected
    assert len(list((study / ".replaced").iterdir())) == 1


def test_killed_between_the_result_and_the_last_word(study: Path) -> None:
    name = next(iter(manifest(study)["cells"]))
    record = json.loads((study / name / "run.json").read_text())
    (study / name / "run.json").write_text(json.dumps(record | {"status": "running"}))
    content = manifest(study)
    content["cells"][name] |= {"status": "running", "result": None}
    (study / "study.json").write_text(json.dumps(content))
    assert run_study(STUDY) == 0
    assert len(results(study)) == 4


def test_cells_are_added_to_a_study(study: Path) -> None:
    assert run_study([BASIC, "ffn=gelu", "seed=0,1", "study=s", *TINY]) == 0
    assert len(statuses(study)) == 6
    assert manifest(study)["baseline"] == "relu"  # declared before


def test_a_single_run_of_a_study_is_one_cell(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_study(["ffn=relu", "seed=1", "study=s", *TINY], several=False) == 0
    assert "finished before" in capsys.readouterr().out
    assert run_study(["ffn=relu", "seed=2", "study=s", *TINY], several=False) == 0
    assert len(statuses(study)) == 5


def test_other_code_stops_the_study_until_it_is_decided(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = results(study)
    one, two, *_ = expected
    for name in (one, two):
        record = json.loads((study / name / "run.json").read_text())
        (study / name / "run.json").write_text(json.dumps(record | {"code": "0ther"}))
    before = (study / "study.json").read_text()
    with pytest.raises(UserError, match=rf"{one} is finished with other code") as caught:
        run_study(STUDY)
    assert two in str(caught.value)
    assert "stale=rerun" in str(caught.value)
    assert "stale=keep" in str(caught.value)
    assert (study / "study.json").read_text() == before

    assert run_study([*STUDY, "stale=keep"]) == 0
    assert "goes on" not in capsys.readouterr().out
    assert [name for name, entry in manifest(study)["cells"].items() if entry.get("stale")] == [one, two]

    assert run_study([*STUDY, "stale=rerun"]) == 0
    assert not any(entry.get("stale") for entry in manifest(study)["cells"].values())
    assert json.loads((study / one / "run.json").read_text())["code"] != "0ther"
    assert results(study) == expected
    assert run_study(STUDY) == 0  # and nothing is stale any more


def test_other_data_is_stale_too(study: Path) -> None:
    name = next(iter(statuses(study)))
    record = json.loads((study / name / "run.json").read_text())
    record["hashes"]["data"] = "0ther"
    (study / name / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"{name} is finished with other data"):
        run_study(STUDY)


def test_half_done_cells_of_other_code_are_stale(study: Path) -> None:
    name = next(iter(statuses(study)))
    (study / name / "result.json").unlink()
    record = json.loads((study / name / "run.json").read_text())
    (study / name / "run.json").write_text(json.dumps(record | {"code": "0ther", "status": "interrupted"}))
    with pytest.raises(UserError, match=f"{name} is half done with other code"):
        run_study(STUDY)


def test_a_failing_cell_stops_no_other_and_is_retried_when_asked(
    own_block: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [BASIC, "ffn=mine", "ffn.breaks_at=8,-1", "seed=0", "study=f", *TINY]
    study = folder / "outputs" / "f"
    assert run_study(command, str(own_block)) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert "RuntimeError: the block broke" in said.err
    assert "study f: 1 failed, 1 finished" in said.out
    bad = next(name for name, status in statuses(study).items() if status == "failed")
    assert said.err.rstrip().splitlines()[-2].startswith(f"{bad}: failed") or f"{bad}: failed" in said.err
    assert "the block broke" in manifest(study)["cells"][bad]["error"]

    assert run_study(command, str(own_block)) == 1
    said = capsys.readouterr()
    assert f"{bad}: failed before: RuntimeError: the block broke" in said.out
    assert "retry=true" in said.out
    assert "starts" not in said.out
    assert "Traceback" not in said.err

    assert run_study([*command, "retry=true"], str(own_block)) == 1
    assert f"{bad}: goes on" in capsys.readouterr().out


def test_a_diverged_cell_is_recorded_and_retried_from_the_start(
    own_block: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [BASIC, "ffn=mine", "ffn.value=1e38,1.0", "seed=0", "study=d", *TINY]
    study = folder / "outputs" / "d"
    assert run_study(command, str(own_block)) == 1
    assert sorted(statuses(study).values()) == ["diverged", "finished"]
    assert "diverged" in capsys.readouterr().err
    assert run_study(command, str(own_block)) == 1
    assert "diverged before" in capsys.readouterr().out
    assert run_study([*command, "retry=true"], str(own_block)) == 1
    assert ": starts" in capsys.readouterr().out


def test_a_cell_that_cannot_run_stops_the_study_before_it_starts(own_block: Path, folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_study([BASIC, "ffn=mine", "ffn.width=0,3", "seed=0,1", "study=p", *TINY], str(own_block))
    lines = str(caught.value).splitlines()
    assert re.match(
        r"mine-s0-\w+ \(ffn=mine ffn.width=3 seed=0 .*\): mine.Mine fails in mine.py, line 18: RuntimeError: ", lines[0]
    )
    assert lines[-1] == "nothing was started"
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["ffn=relu,swigul"], "ffn=swigul is unknown"),
        (["optim.lr=1e-3,fast"], "optim.lr must be a valid number"),
        (["budget=none", "budget.d_ff=10,-3"], "budget.d_ff must be greater than 0"),
        (["model.n_heads=2,5"], "n_heads"),
        (["trainer.devices=2"], "one device"),
        (["trainer.strategy=ddp"], "one device"),
        (["analysis=paried"], "analysis must be 'unpaired' or 'paired'"),
        (["ffn=relu,gelu", "baseline=silu"], "baseline=silu is no block of the study; it has gelu, relu"),
        (["stale=maybe"], "stale must be 'keep' or 'rerun'"),
        (["resume=outputs/x"], "a study goes on when its command is run again"),
        (["study=a/b"], "study"),
        (["experiment=zero_init,swish_beta"], "one experiment is one study"),
        (["hydra/sweeper=nope"], "hydra/sweeper=nope is unknown"),
        (["study=foo,bar"], "study=foo,bar: one command is one study, and has one study"),
        (["++study=foo,bar"], "study=foo,bar: one command"),
        (["baseline=relu,gelu"], "baseline=relu,gelu: one command is one study, and has one baseline"),
        (["analysis=choice(paired,unpaired)"], "analysis=paired,unpaired: one command"),
        (["resume=a,b"], "resume=a,b: one command"),
        (["study=true"], "study must be a name, not true"),
        (["~baseline"], "~baseline takes nothing away: baseline is null already"),
        (["~sweeper"], "there is no such key"),
        (['+hydra.sweeper.params.seed="0,1"'], "hydra.sweeper.params is for experiment files: write -m seed=0,1"),
        (['hydra.sweeper.params={ffn:"relu,gelu"}'], "hydra.sweeper.params is for experiment files"),
    ],
)
def test_mistakes_are_said_before_anything_starts(folder: Path, extra: list[str], message: str) -> None:
    base = [word for word in TINY if word.partition("=")[0] not in {e.partition("=")[0] for e in extra}]
    with pytest.raises(UserError, match=re.escape(message)):
        run_study([BASIC, "seed=0", *base, *extra])
    assert not (folder / "outputs").exists()


def test_a_key_of_a_study_that_is_taken_away_is_the_default_again(folder: Path) -> None:
    sweep, settings = take_apart(["experiment=lr_sensitivity", "~kind", "~fresh_seeds", "seed=0", *TINY], None, True)
    assert (settings.kind, settings.fresh_seeds) == (None, None)
    assert len(make_cells(sweep.jobs, "1e5", None)) == 3 * 4
    assert make_cells(sweep.jobs[:1], "1e5", None)[0].cfg.study == "1e5"


def test_a_value_that_follows_a_swept_one_does_so_in_each_cell(folder: Path) -> None:
    sweep, _ = take_apart(["optim.warmup=${train.batch_size}", "train.batch_size=4,8", *TINY_BUT_BATCH], None, True)
    assert [cell.cfg.optim.warmup for cell in make_cells(sweep.jobs, "s", None)] == [4, 8]


def test_what_was_declared_cannot_change_once_there_are_results(study: Path) -> None:
    with pytest.raises(UserError, match="declared analysis=unpaired before it ran"):
        run_study([*STUDY, "analysis=paired"])
    with pytest.raises(UserError, match="declared baseline=relu"):
        run_study([*STUDY, "baseline=swiglu"])


def test_a_cells_name_depends_on_what_is_computed_and_on_nothing_else() -> None:
    name = cell_name(compose(["ffn=gelu", *TINY]))
    for machine in (
        ["trainer.devices=[0]"], ["trainer.accelerator=auto"], ["logger=wandb"], ["study=x"], ["train.log_every=7"],
        ["train.compile=true"], ["trainer.accumulate_grad_batches=2"],
    ):  # fmt: skip
        assert cell_name(compose(["ffn=gelu", *TINY, *machine])) == name, machine
    for other in (
        ["seed=1"], ["data_seed=1"], ["ffn.bias=true"], ["ffn.down_init=zero"], ["optim.lr=1e-3"],
        ["trainer.precision=bf16-mixed"], ["train.tokens=4096"], ["data.length=4"], ["census.tokens=64"],
    ):  # fmt: skip
        assert cell_name(compose(["ffn=gelu", *TINY, *other])) != name, other


def test_a_study_without_a_name_gets_the_same_one_each_time(folder: Path) -> None:
    command = [BASIC, "ffn=relu,gelu", "seed=0", *TINY]
    assert run_study(command) == 0
    assert run_study([*command, "retry=true"]) == 0  # how it is run is no other study
    assert [path.name[:10] for path in (folder / "outputs").iterdir()] == ["relu-gelu-"]
    assert run_study([BASIC, "ffn=relu,gelu", "seed=1", *TINY]) == 0
    assert len(list((folder / "outputs").iterdir())) == 2


def test_a_cell_that_another_process_holds_is_left_to_it(study: Path) -> None:
    name = next(iter(statuses(study)))
    assert not is_running(study, name)
    with cell_lock(study, name):
        assert is_running(study, name)
        put_aside(study, name, look(study / name, {}))
        assert (study / name / "run.json").exists()
    assert not is_running(study, name)
    seen = look(study / name, {})
    put_aside(study, name, State("finished", {"created": "before"}))  # begun afresh since it was seen
    assert (study / name).exists()
    put_aside(study, name, seen)
    assert not (study / name).exists()


def test_when_a_worker_dies_only_its_cell_fails(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher that loses a worker loses all that run; a stand-in for one, with a cell that kills its process."""
    cells = make_cells([["ffn=relu", f"seed={seed}", *TINY] for seed in range(5)], "s", None)
    deadly = cells[1].name
    names = [cell.name for cell in cells]
    launched = []

    def put(name: str, status: str) -> None:
        update_cell(study, name, status=status)

    def launch(jobs: list[Cell]) -> None:
        launched.append([cell.name for cell in jobs])
        for index, cell in enumerate(jobs):
            if cell.name == deadly:
                for other in jobs[index : index + 2]:
                    put(other.name, "running")
                raise RuntimeError("A worker was killed. Details follow.")
            put(cell.name, "finished")

    declare(study, StudyConfig(), "command", cells, [], [])
    for name in names:
        put(name, "pending")
    _launch_all(study, cells, launch, lambda: False)
    assert launched == [names, [names[1]], [names[2]], names[3:]]
    assert [statuses(study)[name] for name in names] == ["finished", "failed", *["finished"] * 3]
    error = manifest(study)["cells"][deadly]["error"]
    assert error == "its process died: RuntimeError: A worker was killed"
    assert f"{deadly}: failed" in capsys.readouterr().err


def test_a_full_disk_is_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ffnlab.training.train", full)
    assert run_study([BASIC, "ffn=relu", "seed=0", "study=f", *TINY]) == 1
    said = capfd.readouterr().err
    assert "relu-s0" in said
    assert "No space left on device while writing to" in said
    assert "Traceback" not in said
    # It may keep the study from writing down even that.
    monkeypatch.setattr("ffnlab.study.manifest.update_cell", full)
    assert run_study([BASIC, "ffn=gelu", "seed=0", "study=g", *TINY]) == 1
    said = capfd.readouterr().err
    assert re.search(r"gelu-s0-\w+: failed: No space left on device", said)
    assert "Traceback" not in said
