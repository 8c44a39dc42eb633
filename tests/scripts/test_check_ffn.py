"""``scripts/check_ffn.py``: what it prints, its exit status, and what it refuses."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_ffn = load("check_ffn")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder whose block is broken: no activation."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf" / "ffn").mkdir(parents=True)
    (tmp_path / "linear_block.py").write_text(
        "from torch import nn\n"
        "class Linear(nn.Module):\n"
        "    def __init__(self, d_model: int, d_ff: int):\n"
        "        super().__init__()\n"
        "        self.up = nn.Linear(d_model, d_ff)\n"
        "        self.down = nn.Linear(d_ff, d_model)\n"
        "    def forward(self, x):\n"
        "        return self.down(self.up(x))\n"
    )
    (tmp_path / "conf" / "ffn" / "linear.yaml").write_text("_target_: linear_block.Linear\n")
    return tmp_path / "conf"


def test_a_right_block_exits_0(capsys: Capture) -> None:
    assert check_ffn.main(["ffn=swiglu", "ffn.bias=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "swiglu: d_model 24, d_ff 64"
    assert lines[-1].startswith("swiglu keeps the contract: 24 of 24 items pass")
    assert all(line.startswith(("ok ", "- ")) for line in lines[1:-1] if not line.startswith("   "))
    assert max(map(len, lines)) <= 80
    assert "true: adds gate.bias, up.bias, down.bias" in " ".join(" ".join(lines).split())


def test_a_broken_block_exits_1_and_says_what_to_do(faulty: Path, capsys: Capture) -> None:
    assert check_ffn.main(["--config-dir", str(faulty), "ffn=linear"]) == 1
    out = capsys.readouterr().out
    verdict, last = " ".join(out.split()).split("linear breaks the contract: ")[1].split(" The formula ")
    assert verdict == "2 of 19 items fail (nonlinear, nonlinear before down)."
    assert last.startswith("itself was NOT checked: add --like NAME")
    assert "-> the block is a linear map: the activation is missing, or has no effect" in " ".join(out.split())


def test_json_for_machines(faulty: Path, capsys: Capture) -> None:
    assert check_ffn.main(["--json", "ffn=linear", "--config-dir", str(faulty), "--d-model", "8", "--d-ff", "20"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == ["nonlinear", "nonlinear before down"]
    assert (report["d_model"], report["d_ff"], report["passed"]) == (8, 20, False)
    assert {"name", "status", "measured", "fix"} == set(report["items"][0])


@pytest.fixture
def student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A student's SwiGLU, with sigmoid in the place of SiLU."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf" / "ffn").mkdir(parents=True)
    (tmp_path / "student_block.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self, d_model: int, d_ff: int):\n"
        "        super().__init__()\n"
        "        self.gate = nn.Linear(d_model, d_ff, bias=False)\n"
        "        self.up = nn.Linear(d_model, d_ff, bias=False)\n"
        "        self.down = nn.Linear(d_ff, d_model, bias=False)\n"
        "    def forward(self, x):\n"
        "        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))\n"
    )
    (tmp_path / "conf" / "ffn" / "mine.yaml").write_text("_target_: student_block.Mine\n")
    return tmp_path / "conf"


def test_a_formula_that_was_not_checked_is_the_last_thing_said(student: Path, capsys: Capture) -> None:
    assert check_ffn.main(["--config-dir", str(student), "ffn=mine"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "The formula itself was NOT checked: add --like NAME (swiglu, gelu, ...)."


def test_like_names_what_a_wrong_block_computes(student: Path, capsys: Capture) -> None:
    words = ["--config-dir", str(student), "ffn=mine", "--like"]
    assert check_ffn.main([*words, "swiglu"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "it computes glu" in out
    assert "mine keeps the contract, but is not swiglu" in out
    assert check_ffn.main([*words, "glu"]) == 0
    capsys.readouterr()
    assert check_ffn.main([*words, "swiglu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == ["like swiglu"]
    assert (report["like"], report["formula_checked"]) == ("swiglu", True)
    assert check_ffn.main([*words, "swiglue"]) == 1
    assert "did you mean swiglu?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ffn=swiglue"], "did you mean swiglu?"),
        (["ffn=relu", "ffn.biass=true"], "biass"),
        (["ffn=relu", "ffn.dropout_hidden=1.5"], "dropout_hidden"),
        (["--config-dir", "/nowhere", "ffn=relu"], "no such folder"),
    ],
)
def test_bad_input_is_one_short_error(words: list[str], message: str, capsys: Capture) -> None:
    assert check_ffn.main(words) == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_a_block_must_be_named(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        check_ffn.main(["seed=1"])
    assert caught.value.code == 2
    assert "say which block: ffn=NAME" in capsys.readouterr().err
