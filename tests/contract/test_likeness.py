"""``check(..., like=NAME)``: a right block is found equal however it keeps its weights, a wrong one is named."""

import pytest
import torch
from faulty_blocks import Dense, Gated
from test_missing_down import Llama
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.contract import Outcome, check
from ffnlab.contract.likeness import references
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN


def like(block: type, name: str, options: dict | None = None, **sizes: int) -> Outcome:
    report = check(block, options, like=name, items={}, **sizes)
    (outcome,) = [outcome for outcome in report.outcomes if outcome.name == f"like {name}"]
    return outcome


def gated(function, outer=lambda out, x: out) -> type:
    class Mine(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return outer(function(self, x), x)

    return Mine


# --- right blocks


@pytest.mark.parametrize("name", list(references()))
@pytest.mark.parametrize("bias", [False, True])
def test_each_of_ours_is_like_itself_alone(name: str, bias: bool) -> None:
    cls, options = references()[name]
    outcome = like(cls, name, {**options, "bias": bias, "dropout_hidden": 0.5})
    assert outcome.status == "pass", outcome.measured
    other = "geglu" if name != "geglu" else "swiglu"
    outcome = like(cls, other, {**options, "bias": bias})
    assert outcome.status == "fail"
    # Swish at beta 1 is SiLU, and the simpler name comes first
    assert outcome.measured.endswith(f"it computes {'silu' if name == 'swish' else name}")


def test_a_right_block_passes_with_the_largest_difference() -> None:
    outcome = like(Gated, "swiglu")
    assert outcome.status == "pass"
    assert outcome.measured.startswith("equal: output and gradients differ by ")
    assert outcome.measured.endswith("(allowed 1e-10)")


class Packed(nn.Module):
    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.w12 = nn.Linear(d_model, 2 * d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.w12(x).chunk(2, dim=-1)
        return first, second

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.halves(x)
        return self.down(F.silu(gate) * up)


class PackedUpFirst(Packed):
    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().halves(x)[::-1]


class PackedInterleaved(Packed):
    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = self.w12(x)
        return both[..., ::2], both[..., 1::2]


class Raw(nn.Module):
    """Bare parameters, transposed, as in GPT-2's Conv1D."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.zeros(d_model, d_ff))
        self.b_in = nn.Parameter(torch.zeros(d_ff))
        self.w_out = nn.Parameter(torch.zeros(d_ff, d_model))
        self.b_out = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.w_in + self.b_in) @ self.w_out + self.b_out


@pytest.mark.parametrize(
    ("block", "name", "options", "said"),
    [
        (Llama, "swiglu", {}, "with gate = w1, up = w3, down = w2"),
        (Packed, "swiglu", {}, "with gate = first half of w12, up = second half of w12"),
        (Packed, "swiglu", {"bias": True}, "with gate = first half of w12, up = second half of w12"),
        (PackedUpFirst, "swiglu", {}, "with gate = second half of w12, up = first half of w12"),
        (PackedInterleaved, "swiglu", {}, "with gate = even rows of w12, up = odd rows of w12"),
        (Raw, "gelu", {}, "with up = w_in transposed, down = w_out transposed"),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"d_model": 16, "d_ff": 16}])
def test_other_names_and_layouts_are_found_and_said(
    block: type, name: str, options: dict, said: str, sizes: dict[str, int]
) -> None:
    outcome = like(block, name, options, **sizes)
    assert outcome.status == "pass", outcome.measured
    assert said in outcome.measured


def test_beta_is_taken_from_the_options_or_from_the_learned_scalar() -> None:
    assert like(DenseFFN, "swish", {"activation": "swish", "beta": 1.7}).status == "pass"
    assert like(DenseFFN, "swish", {"activation": "swish", "beta": 0.6, "learn_beta": True}).status == "pass"
    outcome = like(GatedFFN, "swiglu", {"activation": "swish", "beta": 1.5})
    assert outcome.status == "fail"
    assert outcome.measured.endswith("it computes the gated block with swish, beta 1.5")


# --- wrong blocks


def _sigmoid_for_silu(self, x):
    return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


WRONG = {
    "sigmoid for silu": ("swiglu", _sigmoid_for_silu, "it computes glu"),
    "gelu for silu": ("swiglu", lambda s, x: s.down(F.gelu(s.gate(x)) * s.up(x)), "it computes geglu"),
    "tanh form": (
        "geglu",
        lambda s, x: s.down(F.gelu(s.gate(x), approximate="tanh") * s.up(x)),
        "it computes the gated block with gelu_tanh",
    ),
    "quick gelu": (
        "geglu",
        lambda s, x: s.down(s.gate(x) * torch.sigmoid(1.702 * s.gate(x)) * s.up(x)),
        "it computes the gated block with swish, beta 1.702",
    ),
    "swapped": ("swiglu", lambda s, x: s.down(s.gate(x) * F.silu(s.up(x))), "equal if your gate and up are swapped"),
    "other and swapped": (
        "swiglu",
        lambda s, x: s.down(s.gate(x) * torch.sigmoid(s.up(x))),
        "it computes glu if your gate and up are swapped",
    ),
    "scaled": ("swiglu", lambda s, x: 2 * s.down(F.silu(s.gate(x)) * s.up(x)), "it computes 2 times swiglu"),
    "residual": ("swiglu", lambda s, x: x + s.down(F.silu(s.gate(x)) * s.up(x)), "it computes swiglu plus its input"),
    "none of ours": ("swiglu", lambda s, x: s.down(F.softplus(s.gate(x)) * s.up(x)), "none of our formulas fits"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_block_fails_and_is_named(case: str) -> None:
    name, forward, said = WRONG[case]
    outcome = like(gated(forward), name)
    assert outcome.status == "fail"
    assert outcome.measured.startswith(f"differs from {name} by ")
    assert outcome.measured.endswith(said), outcome.measured


def test_the_difference_is_of_a_size_that_can_be_read() -> None:
    outcome = like(gated(_sigmoid_for_silu), "swiglu")
    assert 0.1 < float(outcome.measured.split(" by ")[1].split()[0]) <= 1.0


def test_tanh_for_erf_in_a_dense_block() -> None:
    class Tanh(Dense):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x), approximate="tanh"))

    outcome = like(Tanh, "gelu")
    assert outcome.status == "fail"
    assert outcome.measured.endswith("it computes gelu_tanh")
    assert like(Dense, "gelu").status == "pass"


def test_a_dense_block_is_no_gated_one() -> None:
    outcome = like(Dense, "swiglu")
    assert outcome.status == "fail"
    assert outcome.measured == "has 2 matrices (up, down), swiglu 3 (gate, up, down); it computes gelu"


def test_a_transposed_weight_is_found() -> None:
    def transposed(self, x):
        return self.down(F.silu(x @ self.gate.weight) * self.up(x))

    outcome = like(gated(transposed), "swiglu", d_model=16, d_ff=16)
    assert outcome.status == "fail"
    assert outcome.measured.endswith("equal if your gate is transposed")


def test_a_swap_among_names_that_are_half_known_is_said_by_name() -> None:
    class Value(nn.Module):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__()
            self.gate = nn.Linear(d_model, d_ff, bias=False)
            self.value = nn.Linear(d_model, d_ff, bias=False)
            self.down = nn.Linear(d_ff, d_model, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x) * F.silu(self.value(x)))

    outcome = like(Value, "swiglu")
    assert outcome.status == "fail"
    assert outcome.measured.endswith("equal if gate = value, up = gate")


def test_a_cast_to_float32_is_told_from_another_formula() -> None:
    def cast(self, x):
        return self.down(F.silu(self.gate(x).float()).to(x.dtype) * self.up(x))

    outcome = like(gated(cast), "swiglu")
    assert outcome.status == "fail"
    assert outcome.measured.endswith("float32's rounding: is something cast to float32 inside?")


def test_a_block_that_ignores_its_size_is_said_to() -> None:
    class Wide(Dense):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__(d_model, 4 * d_model)

    outcome = like(Wide, "gelu")
    assert outcome.status == "fail"
    assert "not the sizes of gelu with d_model 24, d_ff 64" in outcome.measured


class Biased(nn.Module):
    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_bias_that_is_missing_or_unused_is_said() -> None:
    class NoneInDown(Biased):
        def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
            super().__init__(d_model, d_ff, bias)
            self.down = nn.Linear(d_ff, d_model, bias=False)

    class NoneAtAll(Biased):
        def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
            super().__init__(d_model, d_ff, bias=False)

    class Unused(Biased):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight)

    on = {"bias": True}
    assert like(Biased, "swiglu", on).status == "pass"
    assert like(NoneInDown, "swiglu", {"bias": False}).status == "pass"
    for block, said in (
        (NoneInDown, "equal but for the bias: gate, up have one, down has none"),
        (NoneAtAll, "equal but for the bias: bias=true, and no projection has one"),
        (Unused, "equal if the bias of down is left out"),
    ):
        outcome = like(block, "swiglu", on)
        assert outcome.status == "fail"
        assert outcome.measured.endswith(said), outcome.measured


def test_a_gradient_that_differs_is_named() -> None:
    def detached(self, x):
        return self.down(F.silu(self.gate(x)).detach() * self.up(x))

    outcome = like(gated(detached), "swiglu")
    assert outcome.status == "fail"
    assert outcome.measured.startswith("output equal, but the gradient of gate differs by 1")


def test_a_parameter_beside_the_formula_is_named() -> None:
    class Scaled(Gated):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__(d_model, d_ff)
            self.scale = nn.Parameter(torch.ones(d_ff))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.scale * F.silu(self.gate(x)) * self.up(x))

    outcome = like(Scaled, "swiglu")
    assert outcome.status == "fail"
    assert outcome.measured.endswith("none of our formulas fits; it has scale as well")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"no block of ours is called 'swiglue' \(did you mean swiglu\?\)"):
        check(Gated, like="swiglue")


# --- the report


def test_the_last_line_says_what_became_of_the_formula() -> None:
    last = check(Gated, name="mine").text().splitlines()[-1]
    assert last == "The formula itself was NOT checked: add --like NAME (swiglu, gelu, ...)."
    assert check(GatedFFN, name="swiglu").text().splitlines()[-1].startswith("swiglu keeps the contract")
    compared = check(Gated, name="mine", like="swiglu")
    assert compared.text().splitlines()[-1] == (
        "The formula was compared with this project's swiglu, "
        "whose parity with other libraries is tested (tests/parity)."
    )
    wrong = check(gated(_sigmoid_for_silu), name="mine", like="swiglu")
    assert wrong.failed == ["like swiglu"]
    assert "mine keeps the contract, but is not swiglu: 1 of " in wrong.text()


def test_lines_fit_the_columns_asked_for() -> None:
    text = check(gated(_sigmoid_for_silu), name="mine", like="swiglu").text(columns=80)
    assert max(map(len, text.splitlines())) <= 80
