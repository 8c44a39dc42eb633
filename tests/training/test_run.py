"""One run, whole: through ``train()`` with real data files, Lightning, and offline W&B files read back."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from ffnlab import records
from ffnlab.config import compose, from_plain, to_plain
from ffnlab.errors import UserError
from ffnlab.training import load_run, prepare_run, train
from ffnlab.training.ledger import alone_in, read_points

CHOICES = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "conf" / "ffn").glob("*.yaml"))
QUIET = Console(quiet=True)


def test_a_run_leaves_a_complete_ledger(tiny: list[str], tmp_path: Path) -> None:
    cfg = compose(["ffn=swiglu", "seed=0", *tiny])
    result = train(cfg, tmp_path / "run", console=QUIET)
    run = tmp_path / "run"

    assert from_plain(yaml.safe_load((run / "config.yaml").read_text())) == cfg
    record = records.read(run / "run.json")
    assert record["status"] == "finished"
    assert (record["block"], record["seed"], record["steps"], record["tokens"]) == ("swiglu", 0, 4, 256)
    assert record["parameters"]["total"] == sum(v for k, v in record["parameters"].items() if k != "total")
    assert record["parameters"]["ffn"] == 2 * record["budget"]["params"]
    assert set(record["hashes"]) == {"data", "batches", "shared_init"}
    assert set(record["versions"]) >= {"torch", "lightning", "wandb", "python"}

    points = read_points(run)
    losses = {p["step"]: p["train/loss"] for p in points if "train/loss" in p}
    assert sorted(losses) == [1, 2, 3, 4]
    validations = {p["step"]: p["val/loss"] for p in points if "val/loss" in p}
    assert sorted(validations) == [0, 2, 4]
    assert validations[0] == pytest.approx(math.log(257), abs=0.1)
    assert {p["step"] for p in points if "dead/rel" in p} == {0, 2, 4}
    assert all(p["tokens"] == 64 * p["step"] for p in points)

    assert records.read(run / "result.json").keys() == result.keys()
    assert result["val/perplexity"] == pytest.approx(math.exp(result["val/loss"]))
    assert {p.name for p in (run / "checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt", "final.safetensors"}
    assert not [p for p in run.rglob("*") if "=" in p.name or " " in p.name or p.name.endswith(".tmp")]


def test_the_final_loss_is_the_token_mean_over_the_whole_set(tiny: list[str], tmp_path: Path) -> None:
    result = train(compose(tiny), tmp_path / "run", console=QUIET)
    run = load_run(tmp_path / "run")
    logits = torch.cat([run.network(x).flatten(0, 1) for x, _ in run.data.val_batches(8)])
    targets = torch.cat([y.flatten() for _, y in run.data.val_batches(8)])
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100).item()
    assert result["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert result["val/tokens"] == (targets != -100).sum() == run.data.n_val_tokens
    # Bytes: one token a byte, so bits per byte follow from the loss and the document mark alone.
    assert result["val/bpb"] == pytest.approx(loss / math.log(2) / run.data.bytes_per_token, rel=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_trains_on_the_same_data_within_the_budget(choice: str, tiny: list[str], tmp_path: Path) -> None:
    cfg = compose([f"ffn={choice}", "model.d_model=48", "seed=3", *[o for o in tiny if "d_model" not in o]])
    result = train(cfg, tmp_path / "run", console=QUIET)
    record = records.read(tmp_path / "run" / "run.json")
    assert result["steps"] == 4
    assert math.isfinite(result["val/loss"])
    assert abs(record["budget"]["mismatch"]) <= 0.01
    # Data, batch order and the weights outside the block are those of any other block, made afresh here.
    assert record["hashes"] == prepare_run(dataclasses.replace(cfg, ffn=compose(["ffn=gelu"]).ffn)).hashes


def test_equal_runs_are_equal_and_pairing_holds_between_blocks(tiny: list[str], tmp_path: Path) -> None:
    a = train(compose(["ffn=gelu", *tiny]), tmp_path / "a", console=QUIET)
    b = train(compose(["ffn=gelu", *tiny]), tmp_path / "b", console=QUIET)
    train(compose(["ffn=swiglu", *tiny]), tmp_path / "c", console=QUIET)
    timings = {"seconds", "tokens_per_s"}
    assert {k: v for k, v in a.items() if k not in timings} == {k: v for k, v in b.items() if k not in timings}
    hashes = [records.read(tmp_path / run / "run.json")["hashes"] for run in "abc"]
    assert hashes[0] == hashes[1] == hashes[2]


def test_losses_do_not_depend_on_how_a_step_is_cut_up(tiny: list[str], tmp_path: Path) -> None:
    whole = train(compose(tiny), tmp_path / "whole", console=QUIET)
    parts = train(compose([*tiny, "trainer.accumulate_grad_batches=4"]), tmp_path / "parts", console=QUIET)
    assert parts["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    curves = [
        {p["step"]: p["train/loss"] for p in read_points(tmp_path / run) if "train/loss" in p}
        for run in ("whole", "parts")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.slow
def test_compiled_in_place_gives_the_same_run_and_plain_names(tiny: list[str], tmp_path: Path) -> None:
    eager = train(compose(tiny), tmp_path / "eager", console=QUIET)
    compiled = train(compose([*tiny, "train.compile=true"]), tmp_path / "compiled", console=QUIET)
    assert compiled["val/loss"] == pytest.approx(eager["val/loss"], rel=1e-4)
    state = torch.load(tmp_path / "compiled" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert not [name for name in state if "_orig_mod" in name]


def test_dropout_follows_the_seed_and_only_the_seed(tiny: list[str], tmp_path: Path) -> None:
    def loss(name: str, *more: str) -> float:
        torch.manual_seed(hash(name) % 1000)  # what came before must not matter
        overrides = ["ffn.dropout_hidden=0.3", "init_seed=0", "data_seed=0", *more, *tiny]
        return train(compose(overrides), tmp_path / name, console=QUIET)["train/loss"]

    assert loss("a", "seed=0") == loss("b", "seed=0")
    assert loss("c", "seed=1") != loss("d", "seed=0")


def test_wandb_offline_holds_config_curves_and_summary(tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith("logger")]
    result = train(compose(["ffn=geglu", "study=first", *overrides]), tmp_path / "run", console=QUIET)
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    wandb = shutil.which("wandb", path=str(Path(sys.executable).parent)) or "wandb"
    done = subprocess.run(
        [wandb, "leet", "inspect", "--json", str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    [run] = [r["run"] for r in records if r["type"] == "run"]
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("first", "geglu", "run")
    assert run["config"]["update"]["model"]["d_model"] == 24
    axes = {m["metric"].get("name") or m["metric"]["glob_name"]: m["metric"] for m in records if m["type"] == "metric"}
    assert axes["*"]["step_metric"] == "step"
    assert axes["val/loss"]["step_metric"] == "tokens"
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    curve = {p["step"]: p["train/loss"] for p in read_points(tmp_path / "run") if "train/loss" in p}
    assert {item["step"]: item["train/loss"] for item in history if "train/loss" in item} == curve
    assert any("dead/rel" in item and "dead/rel_L1" in item for item in history)
    summary: dict[str, object] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    assert summary["val/loss"] == result["val/loss"]
    assert summary["dead/rel_picture.format"] == "png"


def test_a_second_run_in_the_process_is_a_run_of_its_own(tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith("logger")]
    for name in ("one", "two"):
        train(compose(overrides), tmp_path / name, console=QUIET)
        assert len(list((tmp_path / name / "wandb").glob("offline-run-*/*.wandb"))) == 1
    ids = [records.read(tmp_path / name / "run.json")["wandb_id"] for name in ("one", "two")]
    assert ids[0] != ids[1]


def test_a_checkpoint_of_another_shape_is_refused(tiny: list[str], tmp_path: Path) -> None:
    train(compose(tiny), tmp_path / "run", console=QUIET)
    path = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["model"]["n_layers"] = 3
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"does not fit this configuration: it has no blocks.2"):
        load_run(tmp_path / "run")


def test_plain_values_survive_the_round_trip() -> None:
    cfg = compose(["ffn=swish", "ffn.learn_beta=true", "seed=0", "data_seed=7"])
    assert from_plain(json.loads(json.dumps(to_plain(cfg)))) == cfg
    assert (cfg.seed, cfg.init_seed, cfg.data_seed) == (0, 0, 7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+trainer.max_steps=5", "use train.tokens"),
        ("+trainer.gradient_clip_val=1.0", "use optim.grad_clip"),
        ("+trainer.devicess=2", "has no argument 'devicess'"),
        ("train.tokens=63", "is less than one batch of 64 tokens"),
        ("trainer.accumulate_grad_batches=3", "must be a multiple"),
    ],
)
def test_settings_that_cannot_run(override: str, words: str, tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith(override.split("=")[0] + "=")]
    with pytest.raises(UserError, match=words):
        train(compose([*overrides, override]), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_the_process_as_it_was(tiny: list[str], tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(compose(tiny), tmp_path / "run", console=QUIET)
    assert torch.tensor(1e-40).mul(1.0).item() != 0.0  # denormals are flushed while it trains, and not after
    assert torch.get_num_threads() == before[0]
    assert torch.are_deterministic_algorithms_enabled() == before[1]


def test_a_resume_holds_the_directory_before_it_reads_anything(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process saves between the reading and the writing would be lost."""
    cfg = compose(["ffn=relu", "logger=none", *tiny])
    train(cfg, tmp_path / "run", console=QUIET)
    (tmp_path / "run" / "result.json").unlink()

    def newest_checkpoint(run_dir: Path, say: object) -> None:
        with pytest.raises(UserError, match="another process"), alone_in(run_dir):
            pass
        raise UserError("it was held")

    monkeypatch.setattr("ffnlab.training.run.newest_checkpoint", newest_checkpoint)
    with pytest.raises(UserError, match="it was held"):
        train(cfg, tmp_path / "run", resume=True, console=QUIET)
    with alone_in(tmp_path / "run"):  # and let go of, although the failure is still at hand
        pass
