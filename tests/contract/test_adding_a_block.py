"""What ``docs/adding-a-block.md`` says is done: its files are written outside the repository, its commands are run."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "adding-a-block.md").read_text()
FENCES = re.findall(r"```(\w+)\n(.*?)```", DOCUMENT, re.DOTALL)
COMMANDS = [line for language, body in FENCES if language == "bash" for line in body.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's own, holding exactly the files of the document."""
    folder = tmp_path_factory.mktemp("mine")
    for _, body in FENCES:
        named = re.match(r"# file: (\S+)\n", body)
        if named:
            path = folder / named.group(1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
    assert ROOT not in folder.parents
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command.replace("$FFNLAB", str(ROOT)))
    assert words[0] == "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def command(word: str) -> str:
    (found,) = [line for line in COMMANDS if word in line]
    return found


def test_the_document_has_the_files_and_the_commands(folder: Path) -> None:
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "conf/ffn/softplus_glu.yaml",
        "my_blocks.py",
        "try_it.py",
    ]
    assert len(COMMANDS) == 3


@pytest.mark.slow
def test_the_check_passes(folder: Path) -> None:
    done = run(command("check_ffn.py"), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "softplus_glu keeps the contract" in done.stdout


def test_the_check_works_from_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_blocks", raising=False)
    runpy.run_path(str(folder / "try_it.py"))
    assert "SoftplusGLU keeps the contract" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_in_the_users_block_is_named(folder: Path, tmp_path: Path) -> None:
    right = (folder / "my_blocks.py").read_text()
    wrong = right.replace("self.act(self.gate(x)) * self.up(x)", "self.gate(x) * self.act(self.up(x))")
    assert wrong != right
    shutil.copytree(folder / "conf", tmp_path / "conf")
    (tmp_path / "my_blocks.py").write_text(wrong)
    done = run(command("check_ffn.py") + " ffn.bias=true ffn.dropout_hidden=0.1 --json", tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == ["pre-activation", "gate side"]


@pytest.mark.slow
def test_the_copy_task_is_solved(folder: Path) -> None:
    done = run(command("copy_task") + " hydra.run.dir=copy", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copy task solved in" in done.stdout


@pytest.mark.slow
def test_a_short_training_leaves_a_complete_ledger(folder: Path) -> None:
    (folder / "words.txt").write_text("".join(f"{n} green bottles, hanging on the wall.\n" for n in range(300)))
    own = "hydra.run.dir=run data=text data.paths=words.txt data.tokenizer.kind=bytes data.cache_dir=tokens"
    done = run(f"{command('train.tokens')} {own}", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["block"] == "softplus_glu"
    assert abs(record["budget"]["mismatch"]) <= 0.01
    assert json.loads((folder / "run" / "result.json").read_text())["steps"] == 20


def test_every_item_of_the_check_is_explained() -> None:
    from ffnlab.contract import ITEMS

    table = DOCUMENT.split("## What the check looks at")[1]
    for item in ITEMS:
        assert item.rsplit(": ", 1)[-1] in table, item
