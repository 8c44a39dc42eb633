"""A block without ``self.down`` fails once, with what to rename; what needs ``down`` is not measured."""

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.contract import check


class Llama(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)
        self.w3 = nn.Linear(d_model, d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GatedWithoutDown(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class HuggingFace(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("block", "measured", "fix"),
    [
        (Llama, "has w1, w2, w3 as Llama's", "rename w2 to down (w1 to gate, w3 to up)"),
        (
            HuggingFace,
            "has gate_proj, up_proj, down_proj, and no down",
            "rename down_proj to down (gate_proj to gate, up_proj to up)",
        ),
        (GatedWithoutDown, "has fc1, fc2, and no down", "rename fc2 to down (fc1 to up)"),
    ],
)
def test_a_missing_down_is_one_failure(block: type, measured: str, fix: str) -> None:
    report = check(block, name="mine")
    assert report.failed == ["down is last"], report.text()
    (failure,) = [outcome for outcome in report.outcomes if outcome.status == "fail"]
    assert (failure.measured, failure.fix) == (measured, fix)
    unmeasured = [outcome for outcome in report.outcomes if outcome.status == "not measured"]
    assert [outcome.name for outcome in unmeasured] == [
        "nonlinear before down",
        "parameter count",
        "zero down: output",
        "zero down: gradient",
    ]
    assert {outcome.measured for outcome in unmeasured} == {"not measured: see 'down is last'"}
    assert "1 of 15 items fail (down is last); 4 not measured." in report.text()


def test_a_block_with_nothing_to_rename_is_told_the_contract() -> None:
    class NoProjection(nn.Module):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__()
            self.gain = nn.Linear(d_model, d_model)

        def forward(self, x: Tensor) -> Tensor:
            return self.gain(x).tanh()

    report = check(NoProjection)
    (failure,) = [outcome for outcome in report.outcomes if outcome.name == "down is last"]
    assert failure.measured == "there is no self.down = nn.Linear(d_ff, d_model)"
