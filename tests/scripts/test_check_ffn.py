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
    assert all(line.startswith(("ok ", "- ")) for line in lines[1:-1])
    assert "true: adds gate.bias, up.bias, down.bias" in "\n".join(lines)


def test_a_broken_block_exits_1_and_says_what_to_do(faulty: Path, capsys: Capture) -> None:
    assert check_ffn.main(["--config-dir", str(faulty), "ffn=linear"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == (
        "linear breaks the contract: 2 of 19 items fail (nonlinear, nonlinear before down)."
    )
    assert "-> the block is a linear map: the activation is missing, or has no effect" in out


def test_json_for_machines(faulty: Path, capsys: Capture) -> None:
    assert check_ffn.main(["--json", "ffn=linear", "--config-dir", str(faulty), "--d-model", "8", "--d-ff", "20"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == ["nonlinear", "nonlinear before down"]
    assert (report["d_model"], report["d_ff"], report["passed"]) == (8, 20, False)
    assert {"name", "status", "measured", "fix"} == set(report["items"][0])


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
