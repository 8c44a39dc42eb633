"""The layer table, and the census of a finished run."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from ffnlab.census.rerun import other_text, rerun_table
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN
from ffnlab.model import LanguageModel, ModelConfig

ROOT = Path(__file__).parents[2]
CONTEXT = 8


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@dataclasses.dataclass
class Text:
    """A corpus in bytes with the face of the project's data."""

    val: np.ndarray
    tokenizer: Bytes = dataclasses.field(default_factory=Bytes)

    def val_batches(self, batch_size: int, limit_tokens: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        count = min(len(self.val) - 1, limit_tokens or len(self.val)) // CONTEXT * CONTEXT
        inputs, targets = (torch.tensor(self.val[i : i + count].astype(int)).view(-1, CONTEXT) for i in (0, 1))
        return zip(inputs.split(batch_size), targets.split(batch_size), strict=True)


def network(kind: str = "relu") -> LanguageModel:
    torch.manual_seed(0)
    block = {"relu": lambda: DenseFFN(8, 20, "relu", bias=True), "swiglu": lambda: GatedFFN(8, 20)}[kind]
    model = LanguageModel(ModelConfig(d_model=8, n_layers=3, n_heads=2, context_length=CONTEXT), 256, block)
    with torch.no_grad():
        if kind == "relu":
            model.blocks[2].ffn.up.bias[:5] = -50
    return model


def data(n: int = 4000) -> Text:
    return Text(np.random.default_rng(0).integers(0, 128, n).astype(np.uint8))


def printed(table) -> str:
    console = Console(width=200, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(table)
    return capture.get()


def test_the_table_has_a_line_for_each_layer_and_the_curve_over_n() -> None:
    text = printed(rerun_table(network(), data(), 1600, title="relu"))
    assert "In %. N = 1,600 tokens (N/4 = 400, N/16 = 100)." in text
    assert "1.9e-03" in text  # 3/N
    for heading in ("N/16", "N/4", "dead", "exact", "never", "dormant"):
        assert heading in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    layers = [line for line in text.splitlines() if "L0" in line or "L2" in line]
    assert " 0.00" in layers[0]
    assert layers[1].count("25.00") >= 6  # three points of the curve, exact, contrib, never open
    assert next(line for line in text.splitlines() if "mean" in line).count("8.33") >= 6


def test_what_is_not_defined_has_no_column() -> None:
    assert "exact" not in printed(rerun_table(network("swiglu"), data(), 400))


def test_n_larger_than_the_data_is_said_with_the_true_n() -> None:
    text = printed(rerun_table(network(), data(2001), 10**6))
    assert "N = 2,000 tokens" in text
    assert "1,000,000 tokens were asked for; the validation set has 2,000." in text
    assert "asked for" not in printed(rerun_table(network(), data(2001), 2000))


def test_the_table_says_where_its_columns_are_defined() -> None:
    text = printed(rerun_table(network(), data(), 400))
    assert "docs/metrics.md" in text
    assert (ROOT / "docs" / "metrics.md").is_file()


def test_other_text_is_read_with_the_tokens_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("To be, or not to be" * 3)
    (tmp_path / "two.txt").write_text("é" * 40, encoding="utf-8")
    other = other_text(data(), [tmp_path / "one.txt", tmp_path / "two.txt"])
    assert bytes(other.val.astype(np.uint8)).decode() == "To be, or not to be" * 3 + "é" * 40
    text = printed(rerun_table(network(), data(), 10**6, [tmp_path / "one.txt"]))
    assert "N = 56 tokens" in text  # 57 bytes: 7 windows of 8
    assert "the files have 56." in text


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"\xff\xfe\xff", "not UTF-8"), (b"", "less than two")]
)
def test_bad_files_are_said_in_a_sentence(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        rerun_table(network(), data(), 100, [tmp_path / "file.txt"])


def test_other_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        other_text(argparse.Namespace(), ["a.txt"])


def script():
    spec = importlib.util.spec_from_file_location("census_script", ROOT / "scripts" / "census.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_counts_a_run_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ffnlab.training

    run = argparse.Namespace(
        network=network(),
        data=data(),
        source=tmp_path / "last.ckpt",
        cfg=argparse.Namespace(ffn=argparse.Namespace(name="relu"), census=argparse.Namespace(final_tokens=800)),
    )
    asked = []

    def load_run(run_dir: str, best: bool = False) -> argparse.Namespace:
        asked.append((run_dir, best))
        return run

    monkeypatch.setattr(ffnlab.training, "load_run", load_run)
    monkeypatch.setenv("COLUMNS", "200")
    assert script().main(["outputs/one"]) == 0
    assert "N = 800 tokens" in capsys.readouterr().out
    assert script().main(["outputs/one", "--n", "160", "--best"]) == 0
    assert "N = 160 tokens" in capsys.readouterr().out
    assert asked == [("outputs/one", False), ("outputs/one", True)]
    assert script().main(["outputs/one", "--n", "0"]) == 1
    assert "error: the census needs at least 1 token" in capsys.readouterr().err


def test_the_script_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
