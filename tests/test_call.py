"""Commands that are printed work where they are pasted."""

import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ffnlab.call import NUMBER, ROOT, call, override, program

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
    *("2026", "1e5", "1_0", "-1.5E+3", ".5", "1.", "007", "1.5.2", "inf", "NaN", "null", "True", "false", "0x1f", ""),
    *("${x}", r"\${x}", r"\\${x} \\", "$", "{a: 1}", "[1]", "a=b", "(c)", "~t", "Öl/ü", "$HOME", "a${b", "'${x}'"),
]


@pytest.mark.parametrize("value", VALUES)
def test_hydra_reads_back_what_an_override_holds(value: str) -> None:
    """As a string, and with nothing filled in."""
    from ffnlab.composition import compose_job

    read = compose_job([override("resume", value)]).cfg.resume
    assert isinstance(read, str)
    assert read == value


def test_a_plain_number_is_what_hydra_takes_for_one() -> None:
    """Every short word of the characters that numbers are written with."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    words = ["".join(letters) for length in range(1, 5) for letters in itertools.product("07_.e+", repeat=length)]
    values = parser.parse_overrides([f"x={word}" for word in words])
    wrong = [
        word
        for word, parsed in zip(words, values, strict=True)
        if isinstance(parsed.value(), int | float) != bool(NUMBER.fullmatch(word))
    ]
    assert wrong == []
