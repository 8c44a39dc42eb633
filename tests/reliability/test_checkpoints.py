"""Damaged and foreign checkpoints are refused by name, and the one before is used."""

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import TINY, Run, record, train_cli

from ffnlab.errors import UserError
from ffnlab.training import load_run
from ffnlab.training.checkpoints import load_checkpoint

LAST = Path("checkpoints") / "last.ckpt"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reached its last checkpoint and has no result."""
    folder = tmp_path_factory.mktemp("run")
    train_cli(folder, [*TINY, "train.tokens=2720", "hydra.run.dir=run"])  # 20 steps: checkpoints at 10 and 20
    (folder / "run" / "result.json").unlink()
    return folder / "run"


@pytest.fixture
def run_dir(interrupted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(interrupted, tmp_path / "run")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    """One bit of one weight, deep inside: torch.load alone would not notice."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 1024] ^= 1
    path.write_bytes(content)


def a_text(path: Path) -> None:
    path.write_text("not a checkpoint")


def a_foreign_one(path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(2)}}, path)


def foreign_shapes(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["state_dict"]["network.token_embedding.weight"] = torch.zeros(3, 3)
    torch.save(content, path)


class Malicious:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        import os

        return os.system, ("touch owned",)


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious()))


def a_pickle_in_an_archive(path: Path) -> None:
    torch.save({"global_step": 3, "state_dict": {}, "callbacks": Malicious()}, path)


@pytest.mark.parametrize(
    "damage", [cut_short, emptied, flipped, a_text, a_foreign_one, a_pickle, a_pickle_in_an_archive]
)
def test_the_one_before_is_used_and_the_bad_one_named(run_dir: Path, damage: Callable[[Path], None]) -> None:
    damage(run_dir / LAST)
    with pytest.raises(UserError, match=r"last\.ckpt"):
        load_checkpoint(run_dir / LAST)
    run = train_cli(run_dir.parent, ["resume=run"])
    lines = [line for line in run.said.splitlines() if "last.ckpt" in line]
    assert len(lines) == 1, run.said
    assert "previous.ckpt (step 10) instead" in lines[0]
    assert record(run_dir)["status"] == "finished"
    assert record(run_dir)["resumed"][-1]["step"] == 10
    assert not (run_dir.parent / "owned").exists()


def test_with_none_left_it_says_so(run_dir: Path) -> None:
    cut_short(run_dir / LAST)
    a_text(run_dir / "checkpoints" / "previous.ckpt")
    run = Run(run_dir.parent, ["resume=run"])
    assert run.wait() == 1
    assert "last.ckpt" in run.said
    assert "previous.ckpt" in run.said
    assert "Traceback" not in run.said


def test_one_of_another_shape_is_refused_with_the_first_difference(run_dir: Path) -> None:
    foreign_shapes(run_dir / LAST)
    run = Run(run_dir.parent, ["resume=run"])
    assert run.wait() == 1
    assert "token_embedding.weight is (3, 3) there" in run.said


def test_what_scripts_read_falls_back_as_well(run_dir: Path) -> None:
    flipped(run_dir / LAST)
    assert load_run(run_dir).source.name == "previous.ckpt"
    flipped(run_dir / "checkpoints" / "best.ckpt")
    with pytest.raises(UserError, match=r"best\.ckpt"):
        load_run(run_dir, best=True)


def test_names_hold_no_equals_signs_and_nothing_is_left_over(interrupted: Path) -> None:
    names = {path.name for path in (interrupted / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "previous.ckpt", "best.ckpt", "final.safetensors"}
    assert not [path for path in interrupted.rglob("*") if "=" in path.name or path.name.endswith(".tmp")]


def test_the_final_weights_are_those_of_the_last_checkpoint(interrupted: Path) -> None:
    from safetensors.torch import load_file

    final = load_file(interrupted / "checkpoints" / "final.safetensors")
    state = load_checkpoint(interrupted / LAST)["state_dict"]
    assert final
    for name, tensor in final.items():
        assert torch.equal(tensor, state[f"network.{name}"])


def test_no_reader_unpickles() -> None:
    """Every torch.load in the package says weights_only=True on its line, and nothing reads pickles or remote code."""
    import ffnlab

    for path in Path(ffnlab.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert source.count("torch.load(") == source.count("weights_only=True)") - source.count(
            "(weights_only=True)"
        ), path
        for word in ("import pickle", "trust_remote_code=True", "allow_pickle=True", "yaml.load(", "eval(input"):
            assert word not in source, (path, word)
