"""The copy task ends when it is solved, and each planted fault produces its own message and no other."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from ffnlab.config import compose
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN
from ffnlab.model import Block
from ffnlab.training import train
from ffnlab.training.copy_task import CopyTaskFailed, Evidence, diagnose

STEP = 32 * 17  # tokens
MESSAGES = {
    "never moved": r"copy task: the loss never moved \(",
    "barely moved": r"copy task: the loss barely moved \(",
    "still falling": r"copy task: the loss was still falling \(",
    "stuck": r"copy task: the loss moved but is stuck \(",
    "a guess": r"copy task: the loss is no better than a guess \(",
    "leak": r"copy task: the loss is 0\.00\d\d, yet generation reproduces \d+ of 32 sequences: a leak from the future",
    "not finite": r"copy task: not finite in step \d+, first in ",
}


def run(run_dir: Path, *overrides: str, steps: int = 300, console: Console | None = None) -> dict[str, float]:
    cfg = compose(["experiment=copy_task", "ffn=relu", f"train.tokens={steps * STEP}", *overrides])
    return train(cfg, run_dir, console=console or Console(quiet=True))


def failure(run_dir: Path, kind: str, *overrides: str, steps: int) -> str:
    """Run, and return the message, which must be that of ``kind`` alone."""
    with pytest.raises(CopyTaskFailed) as caught:
        run(run_dir, *overrides, steps=steps)
    message = str(caught.value)
    assert [name for name, pattern in MESSAGES.items() if re.match(pattern, message)] == [kind], message
    assert "\n" not in message
    assert not (run_dir / "result.json").exists()
    return message


def status(run_dir: Path) -> str:
    return json.loads((run_dir / "run.json").read_text())["status"]


# --- solved


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_it_ends_when_both_conditions_hold(placement: str, tmp_path: Path) -> None:
    console = Console(record=True, quiet=False, file=(tmp_path / "said.txt").open("w"), width=200)
    result = run(tmp_path / "run", f"model.norm_placement={placement}", console=console)
    assert result["copy/exact"] == 1.0
    assert result["copy/loss"] < 0.01
    assert result["copy/steps"] == result["steps"] < 200
    assert result["tokens"] == result["steps"] * STEP
    (line,) = [text for text in console.export_text().splitlines() if text.startswith("copy task")]
    assert line.startswith(f"copy task solved in {result['steps']:.0f} steps: loss 0.00")
    assert line.endswith("32 of 32 training sequences reproduced exactly")
    assert status(tmp_path / "run") == "finished"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["copy/exact"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("block", ["leaky_relu", "gelu", "gelu_tanh", "silu", "swish", "relu2"])
def test_every_dense_block_solves_it(block: str, placement: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", f"ffn={block}", f"model.norm_placement={placement}")["copy/steps"] <= 300


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("block", ["glu", "bilinear", "reglu", "geglu", "swiglu"])
def test_every_gated_block_solves_it(block: str, placement: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", f"ffn={block}", f"model.norm_placement={placement}")["copy/steps"] <= 300


@pytest.mark.slow
@pytest.mark.parametrize("down_init", ["normal", "zero"])
def test_it_is_solved_from_other_starts(down_init: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", f"ffn.down_init={down_init}")["copy/exact"] == 1.0


@pytest.mark.slow
def test_it_generalises_to_held_out_sequences(tmp_path: Path) -> None:
    console = Console(record=True, file=(tmp_path / "said.txt").open("w"), width=200)
    result = run(tmp_path / "run", "copy_task.generalise=true", console=console)
    assert result["copy/exact"] == 1.0
    assert "32 of 32 held-out sequences" in console.export_text()


# --- the four planted faults


def test_a_learning_rate_of_zero_never_moves(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "never moved", "optim.lr=0", steps=12)
    assert message.endswith("after 12 steps): optim.lr is 0")
    assert status(tmp_path / "run") == "failed"


def test_a_dead_gradient_never_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return x.detach() + self.ffn(self.ffn_norm(x.detach())).detach()

    monkeypatch.setattr(Block, "forward", forward)
    monkeypatch.setattr("ffnlab.model.head_loss.F.cross_entropy", _through_a_detached_head)
    message = failure(tmp_path / "run", "never moved", steps=12)
    assert "dead gradient, none reaches blocks.0.attention.out.weight, blocks.0.attention.qkv.weight" in message


def _through_a_detached_head(logits: Tensor, targets: Tensor, **options: object) -> Tensor:
    return _cross_entropy(logits.detach() + 0 * logits, targets, **options)


_cross_entropy: Callable[..., Tensor] = functional.cross_entropy


def test_a_learning_rate_that_is_too_small_is_named_before_any_wiring(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "barely moved", "optim.lr=1e-5", steps=120)
    assert "the learning rate, 1e-05 at most, is too small for so few steps (the weights moved by 5% of " in message
    assert "wired" not in message


def test_too_few_steps_are_named_before_any_wiring(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "still falling", steps=30)
    assert "it needs more steps (train.tokens) or a higher learning rate (optim.lr, now 0.005); else norm" in message


def test_a_learning_rate_that_is_too_high_is_named(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "a guess", "optim.lr=0.5", steps=60)
    assert "goal 0.01): the learning rate, 0.5, too high, or attention" in message


def _without_residual(self: Block, x: Tensor) -> Tensor:
    return self.ffn(self.ffn_norm(self.attention(self.attention_norm(x))))


def test_a_missing_residual_in_a_deep_network_is_no_better_than_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "forward", _without_residual)
    message = failure(tmp_path / "run", "a guess", "model.n_layers=6", steps=60)
    assert message.endswith("a guess 2.773, goal 0.01): attention, positions, norm or residual wired wrong")


def test_a_residual_that_is_lost_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return self.ffn(self.ffn_norm(x + self.attention(self.attention_norm(x)).mean(1, keepdim=True)))

    monkeypatch.setattr(Block, "forward", forward)
    message = failure(tmp_path / "run", "stuck", steps=100)
    assert message.endswith("goal 0.01): norm or residual wired wrong")


def test_dropout_that_is_too_high_is_named(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "still falling", "model.dropout_embedding=0.9", steps=40)
    assert "dropout too high (up to 0.9)" in message


def test_attention_that_sees_the_future_is_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functional.scaled_dot_product_attention

    def uncausal(*args: Tensor, **options: object) -> Tensor:
        return attend(*args, **{**options, "is_causal": False})

    monkeypatch.setattr("ffnlab.model.attention.F.scaled_dot_product_attention", uncausal)
    message = failure(tmp_path / "run", "leak", steps=150)
    assert message.endswith("a leak from the future; is attention causal?")


def test_a_block_of_ones_own_that_mixes_tokens_is_asked_about_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MixesTokens(DenseFFN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.roll(-1, 1))

    monkeypatch.setattr("ffnlab.ffn.DenseFFN", MixesTokens)
    message = failure(tmp_path / "run", "leak", steps=200)
    asked = "does MixesTokens mix tokens ('token independence' in scripts/check_ffn.py tells)? If not, is attention"
    assert asked in message


def test_an_initialisation_that_overflows_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Explodes(DenseFFN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1e30 * 1e30

    monkeypatch.setattr("ffnlab.ffn.DenseFFN", Explodes)
    message = failure(tmp_path / "run", "not finite", steps=12)
    assert "initialisation" in message
    assert status(tmp_path / "run") == "diverged"


def test_a_step_that_overflows_is_not_finite(tmp_path: Path) -> None:
    message = failure(tmp_path / "run", "not finite", "optim.lr=1e38", "optim.warmup=0", steps=12)
    assert "learning rate" in message


# --- the rest


def test_a_goal_without_the_copy_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the copy task brings its own data"):
        run(tmp_path / "run", "data=text", "data.paths=README.md", "~data.generalise")
    assert not (tmp_path / "run").exists()


def test_a_parameter_that_never_learns_is_mentioned_even_when_solved(tmp_path: Path) -> None:
    class Idle(nn.Module):
        def __init__(self, d_model: int, d_ff: int, **_: object) -> None:
            super().__init__()
            self.up = nn.Linear(d_model, d_ff, bias=False)
            self.down = nn.Linear(d_ff, d_model, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)).detach())

    console = Console(record=True, file=(tmp_path / "said.txt").open("w"), width=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ffnlab.ffn.DenseFFN", Idle)
        run(tmp_path / "run", console=console)
    assert "(but no gradient ever reached blocks.0.ffn.up.weight, " in console.export_text()


FLAT, FALLEN = [(300, 2.9)], [(250, 1.5), (300, 1.0)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"losses": [(300, 0.009)], "exact": 3}, "3 of 32 sequences: a leak"),
        ({"losses": FLAT, "lr": 1e-9, "moved": 0.0}, "1e-09 at most, is too small"),
        ({"losses": [(300, 2.6)], "lr": 1e-5, "moved": 0.12}, "1e-05 at most, is too small for so few steps (the wei"),
        ({"losses": [(300, 9.0)], "lr": 3.0}, "the learning rate, 3, too high, or att"),
        ({"losses": [(150, 1.0), (300, 0.99)], "moved": 32.0, "lr": 0.05}, "the learning rate, 0.05, too high, or n"),
        ({"losses": FALLEN}, "): it needs more steps (train.tokens) or a higher"),
        ({"losses": [(150, 1.0), (300, 0.99)]}, "stuck (2.900 at the start, 0.990 after 300 steps, goal 0.01): norm"),
        ({"losses": [(150, 2.76), (300, 2.76)]}, "no better than a guess (2.900 at the start, 2.760 after 300 steps"),
        ({"losses": [(300, 2.0)], "starved": ["a", "b", "c", "d"]}, "dead gradient in a, b, c and 1 more, or "),
    ],
)
def test_the_diagnosis_names_what_was_seen(change: dict, text: str) -> None:
    seen = Evidence(goal=0.01, chance=2.773, n=32, step=300, lr=5e-3, moved=2.0)
    for name, value in change.items():
        setattr(seen, name, value)
    seen.losses = [(0, 2.9), *seen.losses]
    assert text in diagnose(seen)
    assert not seen.solved
