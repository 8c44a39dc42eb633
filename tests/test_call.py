"""Commands that are printed work where they are pasted."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ffnlab.call import ROOT, call, override, program

BIN = str(Path(sys.executable).parent)


@pytest.mark.parametrize("where", [".", "docs", "docs/pictures", "/", "elsewhere"])
def test_a_command_finds_its_script_from_any_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if where == "elsewhere" else ROOT / where)
    _, script, *rest = shlex.split(call("scripts/report.py", Path("out puts/x"), "--prompt", "To be"))
    assert Path(script).resolve() == ROOT / "scripts" / "report.py"
    assert rest == ["out puts/x", "--prompt", "To be"]


def test_in_the_projects_own_folder_it_is_as_short_as_in_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", BIN)
    assert call("train.py", override("resume", "outputs/one")) == "python train.py resume=outputs/one"
    assert program("wandb") == "wandb"
    monkeypatch.chdir(ROOT.parent)
    assert call("train.py") == f"python {ROOT.name}/train.py"


def test_a_python_that_its_name_alone_would_not_find_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    printed = shlex.split(call("scripts/census.py", "--help"))
    assert Path(printed[0]).samefile(sys.executable)
    done = subprocess.run([*printed], capture_output=True, text=True, timeout=60, check=True)
    assert "RUN_DIR" in done.stdout
    assert program("there-is-no-such-program") == "there-is-no-such-program"


VALUES = [
    "plain",
    "out/a b",
    "it's",
    'say "x"',
    "a,b",
    r"back\slash",
    r"ends in \\",
    r'\\" both',
    "gelu · down_init=zero",
]


@pytest.mark.parametrize("value", VALUES)
def test_hydra_reads_back_what_an_override_holds(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (parsed,) = OverridesParser.create().parse_overrides([override("resume", value)])
    assert str(parsed.value()) == value
