"""A small study on each launcher, and what the launchers are told about cores."""

import json
from pathlib import Path

import pytest
from commands import BASIC, TINY, Command, results
from omegaconf import OmegaConf

from ffnlab.composition import compose_sweep, cores
from ffnlab.config import compose
from ffnlab.errors import UserError
from ffnlab.study.resources import check_one_device, threads_per_cell
from ffnlab.study.runner import run_study

CELLS = ["ffn=relu,swiglu", "seed=0", "study=s", *TINY]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-by-one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_study([BASIC, *CELLS]) == 0
    return folder / "outputs" / "s"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local"],
        ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
    ],
    ids=["joblib", "submitit_local", "ray"],
)
def test_a_launcher_runs_a_study(launcher: list[str], tmp_path: Path, one_by_one: Path) -> None:
    pytest.importorskip(
        {"joblib": "hydra_plugins.hydra_joblib_launcher", "ray": "ray"}.get(launcher[0][15:], "submitit")
    )
    command = Command(tmp_path, ["-m", *launcher, *CELLS])
    assert command.wait() == 0, command.said
    study = tmp_path / "outputs" / "s"
    assert results(study) == results(one_by_one)
    for path in study.glob("*/run.json"):
        record = json.loads(path.read_text())
        assert record["hardware"]["threads"] == 1
        assert record["command"].startswith("python train.py -m hydra/launcher=")
    assert {path.name for path in study.iterdir() if not path.name.startswith(".")} == {*results(study), "study.json"}
    again = Command(tmp_path, ["-m", *launcher, *CELLS])
    assert again.wait() == 0
    assert again.said.count("finished before") == 2


@pytest.mark.slow
def test_cells_in_one_process_do_not_touch_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cell sets for the whole process is gone for the next one; each has a W&B run of its own."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "theonlyone")
    words = [word for word in TINY if not word.startswith("logger")]
    assert run_study([BASIC, "+trainer.deterministic=true", "ffn=relu", "seed=0,1", "study=w", *words]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs" / "w").glob("*/run.json")]
    ids = {record["wandb_id"] for record in records}
    assert len(ids) == 2
    assert "theonlyone" not in ids
    for path in (tmp_path / "outputs" / "w").glob("*/run.json"):
        assert len(list((path.parent / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize(("n_jobs", "n_cells", "share"), [(1, 8, 1), (2, 8, 2), (4, 2, 2), (-1, 3, 3), (64, 64, 64)])
def test_threads_never_exceed_the_cores(n_jobs: int, n_cells: int, share: int) -> None:
    launcher = OmegaConf.create({"_target_": "x.joblib_launcher.JoblibLauncher", "n_jobs": n_jobs})
    threads = threads_per_cell(launcher, n_cells)
    assert threads is not None
    at_once = min(cores() if n_jobs < 0 else n_jobs, n_cells)
    assert threads == max(1, cores() // at_once)
    assert at_once <= share


def test_the_launchers_own_figures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(*words: str) -> int | None:
        return threads_per_cell(compose_sweep([*words]).master.hydra.launcher, 8)

    assert threads("hydra/launcher=basic") is None
    assert threads("hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=6") == 6
    assert threads("hydra/launcher=submitit_local") == 1
    assert threads("hydra/launcher=ray", "hydra.launcher.ray.remote.num_cpus=3") == 3
    assert threads() == max(1, cores() // min(8, int(compose_sweep([]).master.hydra.launcher.n_jobs)))


@pytest.mark.parametrize(
    "words", [["trainer.devices=2"], ["trainer.devices=[0,1]"], ["trainer.strategy=ddp"], ["trainer.num_nodes=2"]]
)
def test_a_cell_has_one_device(words: list[str]) -> None:
    with pytest.raises(UserError, match="would start the whole study again"):
        check_one_device(compose(words))


@pytest.mark.parametrize("words", [[], ["trainer.devices=[3]"], ["trainer.devices=auto"]])
def test_one_device_in_any_words(words: list[str]) -> None:
    check_one_device(compose(words))
