"""The bench from its command line, at a size where nothing can be learnt about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffnlab.bench.startup import first_step_seconds
from ffnlab.bench.studies import measure_studies
from ffnlab.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench.py"), *words], capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_race_and_split(tmp_path: Path, tiny: list[str]) -> None:
    path = tmp_path / "bench.json"
    sizes = ["--shapes", "tiny", "--threads", "1", "--slices", "3", "--slice-steps", "2", "--json", str(path)]
    names = ["ffnlab", "bare", "gpt2", "x-transformers", "products"]
    done = bench("--parts", "race", "split", "--contenders", *names, *sizes, *tiny, "train.val_every=4")
    assert done.returncode == 0, done.stderr
    assert "ffnlab / x-transformers" in done.stdout
    assert "<- largest that is no matrix product" in done.stdout
    (race,) = json.loads(path.read_text())["races"]
    assert set(race["records"]) == set(names)
    assert all(len(record["seconds"]) == 3 for record in race["records"].values())
    # Steps 1 to 3 warm up; validations after 4 and 8, in the first slice and the third.
    assert race["records"]["ffnlab"]["validated"] == [True, False, True]


def test_unknown_words_are_answered_shortly() -> None:
    done = bench("--shapes", "huge")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: unknown shape 'huge'; choose one of tiny, nanogpt-cpu")


@pytest.mark.slow
def test_first_step_is_seen(tiny: list[str]) -> None:
    spread = first_step_seconds(1, tiny)
    assert 0 < spread.low <= spread.high


@pytest.mark.slow
def test_first_step_of_a_run_that_cannot_start() -> None:
    with pytest.raises(UserError, match="ended before its first step: error: ffn=nonesuch is unknown"):
        first_step_seconds(1, ["ffn=nonesuch"])


@pytest.mark.slow
def test_cells_two_ways(tiny: list[str]) -> None:
    found = measure_studies(256, n_cells=1, overrides=tiny)
    assert found.together > 0
    assert found.in_turn > 0
    assert found.ratio == pytest.approx(found.together / found.in_turn)


@pytest.mark.slow
def test_gpu_check_on_the_cpu(tmp_path: Path) -> None:
    sizes = ["model.d_model=24", "model.n_layers=1", "model.n_heads=2", "model.context_length=16"]
    words = ["--contenders", "bare", "products", "--slice-steps", "1", "--json", str(tmp_path / "gpu.json")]
    environment = {**os.environ, "DEVICE": "cpu", "SHAPES": "tiny", "SLICES": "2", "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "gpu_check.sh"), *words, *sizes, "train.batch_size=4"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "MFU" in done.stdout
    assert json.loads((tmp_path / "gpu.json").read_text())["races"][0]["setting"]["ffn"] == "swiglu"
