"""``scripts/copy_table.py``: a row a block, blocks of one's own, failures with their cause."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("copy_table", Path(__file__).parents[2] / "scripts" / "copy_table.py")
assert SPEC is not None
assert SPEC.loader is not None
copy_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(copy_table)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a block in it, which is where the command is typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "ffn").mkdir(parents=True)
    (tmp_path / "own_copy_block.py").write_text("from ffnlab.ffn import DenseFFN\nclass Own(DenseFFN):\n    pass\n")
    (tmp_path / "conf" / "ffn" / "own.yaml").write_text("_target_: own_copy_block.Own\nactivation: relu\nbias: false\n")
    return Path("conf")


def test_a_row_for_each_block_and_failures_with_their_cause(capsys: Capture) -> None:
    assert {"relu", "swiglu"} <= set(copy_table.choices(None))
    assert copy_table.main(["--blocks", "relu", "train.tokens=16320"]) == 1  # 30 steps are too few
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "| relu | failed | failed |"
    assert captured.err.count("copy task: the loss was still falling") == 2
    assert copy_table.main(["--blocks", "relu"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    steps = [int(cell.split()[0]) for cell in row.strip("| ").split("|")[1:]]
    assert all(20 < count < 200 for count in steps)


@pytest.mark.parametrize("words", [["--blocks", "own"], ["ffn=own"]])
def test_a_block_of_ones_own_beside_the_command(own_conf: Path, capsys: Capture, words: list[str]) -> None:
    assert copy_table.main(["--config-dir", str(own_conf), *words]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| own | ")
    assert "failed" not in row
    assert copy_table.choices(own_conf)[0] == "own"


def test_what_cannot_be_meant_is_refused(own_conf: Path, capsys: Capture) -> None:
    assert copy_table.main(["--config-dir", "nowhere", "ffn=own"]) == 1
    assert "error: --config-dir nowhere: there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        copy_table.main(["--blocks", "relu", "ffn=own"])
    assert "not by both" in capsys.readouterr().err
