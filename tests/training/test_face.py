"""What a run says: its commands can be pasted, and each loss is told with the tokens it was measured on."""

import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from ffnlab.call import ROOT
from ffnlab.config import compose
from ffnlab.training import train
from ffnlab.training.face import say_result


def test_the_last_lines_hold_one_command_each_that_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, file=(tmp_path / "said.txt").open("w"), width=60)
    result = {"val/loss": 4.0, "val/bpb": 2.0, "val/tokens": 1000.0, "seconds": 2.0, "tokens_per_s": 500.0}
    run_dir = Path("out[puts]/a run")
    say_result(console, run_dir, result, 6.0, run_dir / "wandb" / "offline")
    lines = console.export_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith(("sample ", "W&B "))]
    sample, sync, leet = commands
    assert Path(sample[1]).resolve() == ROOT / "scripts" / "sample.py"
    assert sample[2:] == [str(run_dir), "--prompt", "To be"]
    assert [sync[1:], leet[1:]] == [[verb, str(run_dir / "wandb" / "offline")] for verb in ("sync", "leet")]
    assert f"run       {run_dir}" in lines


def test_a_loss_on_a_part_of_the_validation_set_says_so(tiny: list[str], tmp_path: Path) -> None:
    console = Console(record=True, file=(tmp_path / "said.txt").open("w"), width=200)
    result = train(compose([*tiny, "train.val_tokens=64"]), tmp_path / "run", console=console)
    lines = console.export_text().splitlines()
    on_the_way = [line for line in lines if re.match(r"step +\d+ +val/loss", line)]
    whole = f"{result['val/tokens']:,.0f}"
    assert len(on_the_way) >= 2
    assert all(re.search(rf"  on \d+ of {whole} tokens$", line) for line in on_the_way)
    assert f"last: all {whole} validation tokens, and the last census" in lines
    console = Console(record=True, file=(tmp_path / "said.txt").open("w"), width=200)
    train(compose([*tiny, "train.val_tokens=1_000_000"]), tmp_path / "whole", console=console)
    assert f" of {whole} tokens" not in console.export_text()
