"""A block from a configuration node: what is refused, and in which words."""

from typing import Literal

import pytest
from torch import nn

from ffnlab.ffn import DenseFFN, check_options, locate, make_block


class Fancy(nn.Module):
    """A user's block with typed options."""

    def __init__(self, d_model: int, d_ff: int, rank: int, mode: Literal["a", "b"] = "a", gain: float | None = None):
        super().__init__()
        self.down = nn.Linear(d_ff, d_model)


class Backwards(nn.Module):
    """A block whose sizes come in the wrong order."""

    def __init__(self, d_ff: int, d_model: int) -> None:
        super().__init__()


def test_a_block_is_built_with_its_options() -> None:
    block = make_block("ffnlab.ffn.DenseFFN", {"activation": "gelu", "bias": True})(4, 8)
    assert isinstance(block, DenseFFN)
    assert block.up.bias is not None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("DenseFFN", "must be a dotted path"),
        ("no_such_module.Block", "cannot be imported"),
        ("ffnlab.ffn.Dense", "has no Dense"),
        ("math.sqrt", "must be a torch.nn.Module class"),
    ],
)
def test_targets_that_name_no_block(target: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        locate(target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "mood": "a"}, "no option 'mood' \\(options: rank, mode, gain\\)"),
        ({"rank": 2, "d_ff": 7}, "no option 'd_ff'"),
        ({}, "needs the option 'rank'"),
        ({"rank": "2"}, "ffn.rank must be of type int"),
        ({"rank": True}, "ffn.rank must be of type int"),
        ({"rank": 2, "mode": "c"}, "ffn.mode must be of type"),
        ({"rank": 2, "gain": "x"}, "ffn.gain must be of type"),
    ],
)
def test_options_are_held_against_the_signature(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_options(Fancy, options)


def test_good_options_pass_and_an_int_is_a_fine_float() -> None:
    check_options(Fancy, {"rank": 2, "mode": "b", "gain": 1})
    check_options(Fancy, {"rank": 2, "gain": None})


def test_sizes_come_first() -> None:
    with pytest.raises(ValueError, match=r"must be built as Backwards\(d_model, d_ff"):
        check_options(Backwards, {})
