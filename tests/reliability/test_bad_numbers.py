"""A loss or gradient that is not finite ends the cell within its step, and says where it began."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import TINY, Run, record, steps_logged
from rich.console import Console

from ffnlab.config import compose
from ffnlab.ffn import GatedFFN
from ffnlab.training import Diverged, train
from ffnlab.training.checkpoints import load_checkpoint
from ffnlab.training.guard import first_nonfinite
from ffnlab.training.ledger import read_points
from ffnlab.training.module import LMModule

STEP = 13


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[LMModule, torch.Tensor], torch.Tensor]) -> None:
    """Let ``fault(module, loss)`` act on the loss of the given step's first part."""
    original = LMModule.training_step

    def step(self: LMModule, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        parts = self.trainer.accumulate_grad_batches
        if self.trainer.global_step + 1 == STEP and batch_idx % parts == 0:
            fault(self, torch.tensor(0.0))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LMModule, "training_step", step)


def spoil_activation(value: float) -> Callable[[LMModule, torch.Tensor], torch.Tensor]:
    def fault(module: LMModule, loss: torch.Tensor) -> torch.Tensor:
        up = module.network.get_submodule("blocks.1.ffn.up")  # the second layer's
        once = up.register_forward_hook(lambda m, inputs, output: output.index_fill(-1, torch.tensor([0]), value))
        module.spoilt = once  # type: ignore[assignment]
        return loss

    return fault


def spoil_gradient(value: float) -> Callable[[LMModule, torch.Tensor], torch.Tensor]:
    def fault(module: LMModule, loss: torch.Tensor) -> torch.Tensor:
        module.network.get_parameter("blocks.0.ffn.down.weight").register_hook(lambda gradient: gradient * value)
        return loss

    return fault


def spoil_weight(value: float) -> Callable[[LMModule, torch.Tensor], torch.Tensor]:
    def fault(module: LMModule, loss: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.network.get_parameter("blocks.0.attention.out.weight")[0, 0] = value
        return loss

    return fault


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (spoil_activation, "blocks.1.ffn.up output"),
        (spoil_gradient, "gradient of blocks.0.ffn.down.weight"),
        (spoil_weight, "weight blocks.0.attention.out.weight"),
    ],
    ids=["activation", "gradient", "weight"],
)
def test_it_stops_within_the_step_and_names_the_first_bad_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[float], Callable[[LMModule, torch.Tensor], torch.Tensor]],
    names: str,
    value: float,
    parts: int,
) -> None:
    plant(monkeypatch, fault(value))
    run_dir = tmp_path / "run"
    cfg = compose([*TINY, f"trainer.accumulate_grad_batches={parts}"])
    with pytest.raises(Diverged) as raised:
        train(cfg, run_dir, console=Console(quiet=True))
    assert (raised.value.step, raised.value.tensor) == (STEP, names)
    content = record(run_dir)
    assert content["status"] == "diverged"
    assert content["diverged"]["step"] == STEP
    assert content["diverged"]["tensor"] == names
    # warm-up over 5 steps, then a cosine over the other 35
    fall = 0.5 * (1 + math.cos(math.pi * (STEP - 1 - 5) / 34))
    assert content["diverged"]["lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * fall))
    assert steps_logged(run_dir) < STEP
    assert not (run_dir / "result.json").exists()
    last = load_checkpoint(run_dir / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 10
    assert all(bool(tensor.isfinite().all()) for tensor in last["state_dict"].values())


def test_the_part_of_a_step_that_was_bad_is_the_one_looked_into() -> None:
    from ffnlab.model import LanguageModel, ModelConfig

    network = LanguageModel(
        ModelConfig(d_model=24, n_layers=1, n_heads=2, tied_head=False), 20, lambda: GatedFFN(24, 64)
    )
    with torch.no_grad():
        network.token_embedding.weight[7] = 3e38  # only batches that hold token 7 overflow
    good, bad = torch.zeros(2, 8, dtype=torch.long), torch.full((2, 8), 7)
    assert first_nonfinite(network, [(good, good)]) == "gradient norm"
    assert first_nonfinite(network, [(good, good), (bad, bad)]) == "blocks.0.attention_norm output"


class Overflowing(GatedFFN):
    """Its own arithmetic goes wrong, in none of its modules."""

    def __init__(self, where: str) -> None:
        super().__init__(24, 64)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        if self.where == "hidden":
            hidden = hidden * math.inf
        output = self.down(hidden)
        return output * math.inf if self.where == "output" else output


@pytest.mark.parametrize(("where", "named"), [("hidden", "ffn.down input"), ("output", "ffn output")])
def test_a_blocks_own_arithmetic_is_named(where: str, named: str) -> None:
    from ffnlab.model import LanguageModel, ModelConfig

    network = LanguageModel(ModelConfig(d_model=24, n_layers=2, n_heads=2), 20, lambda: Overflowing(where))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert first_nonfinite(network, [(tokens, tokens)]) == f"blocks.0.{named}"


@pytest.mark.parametrize("clip", ["optim.grad_clip=1.0", "optim.grad_clip=0"])
def test_a_huge_learning_rate_ends_as_diverged_on_the_command_line(tmp_path: Path, clip: str) -> None:
    args = [*TINY, "ffn=relu2", "optim.lr=1e30", "optim.warmup=0", clip, "train.val_every=1000", "hydra.run.dir=run"]
    run = Run(tmp_path, args)
    assert run.wait() == 1
    assert "error: diverged in step" in run.said
    assert "Traceback" not in run.said
    content = record(tmp_path / "run")
    assert content["status"] == "diverged"
    assert content["diverged"]["step"] <= 5
    assert content["diverged"]["lr"] > 1e28


def test_numbers_that_turn_bad_between_two_steps_are_found_by_the_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update itself can overflow: the next forward pass, in training or validation, tells."""
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Callable[[], float] | None = None) -> float | None:
        result = original(self, closure)
        if self.state and int(next(iter(self.state.values()))["step"]) == 10:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].fill_(math.inf)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(Diverged):
        train(compose(TINY), tmp_path / "run", console=Console(quiet=True))
    assert record(tmp_path / "run")["status"] == "diverged"
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 0


def test_a_ledger_never_holds_a_number_that_json_has_not(tmp_path: Path) -> None:
    args = [*TINY, "optim.lr=1e6", "optim.warmup=0", "optim.grad_clip=0"]
    with contextlib.suppress(Diverged):
        train(compose(args), tmp_path / "run", console=Console(quiet=True))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for text in [*lines, (tmp_path / "run" / "run.json").read_text()]:
        json.loads(text, parse_constant=pytest.fail)  # called for NaN and Infinity


def test_a_spike_of_the_gradient_norm_is_logged_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LMModule.training_step

    def step(self: LMModule, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = original(self, batch, batch_idx)
        return loss * 1000 if self.trainer.global_step + 1 == STEP else loss

    monkeypatch.setattr(LMModule, "training_step", step)
    train(compose(TINY), tmp_path / "run", console=Console(quiet=True))
    spikes = {p["step"]: p["grad_norm_spike"] for p in read_points(tmp_path / "run") if "grad_norm_spike" in p}
    assert list(spikes) == [STEP]
    assert spikes[STEP] > 100


def test_float16_which_skips_steps_in_silence_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, [*TINY, "trainer.precision=16-mixed"])
    assert run.wait() == 1
    assert "use bf16-mixed" in run.said
