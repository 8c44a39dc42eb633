"""Batches depend on their arguments alone; validation windows cover every target once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffnlab.data import val_windows, windows

TOKENS = np.arange(1000, dtype=np.uint16)


@given(
    data_seed=st.integers(-(2**40), 2**70),
    steps=st.lists(st.integers(0, 2**50), min_size=1, max_size=5),
    batch_size=st.integers(1, 9),
    context_length=st.integers(1, 50),
)
def test_a_batch_does_not_depend_on_what_was_drawn_before(
    data_seed: int, steps: list[int], batch_size: int, context_length: int
) -> None:
    forward = {step: windows(TOKENS, data_seed, step, batch_size, context_length) for step in steps}
    torch.rand(3)
    for step in reversed(steps):
        inputs, targets = windows(TOKENS, data_seed, step, batch_size, context_length)
        assert torch.equal(inputs, forward[step][0])
        assert torch.equal(targets, forward[step][1])
        assert inputs.shape == targets.shape == (batch_size, context_length)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        # consecutive token values: a window is a run of the stream, targets one ahead
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(context_length))


def test_the_known_batch_stays_the_known_batch() -> None:
    """A change of generator, key or draw order would silently break resume and comparisons with old runs."""
    inputs, _ = windows(TOKENS, 3, 7, 4, 2)
    assert inputs[:, 0].tolist() == [56, 160, 904, 821]


def test_global_generators_are_left_alone() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    windows(TOKENS, 0, 0, 4, 8)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_seeds_and_steps_give_different_batches() -> None:
    first = {tuple(windows(TOKENS, seed, step, 4, 8)[0][:, 0].tolist()) for seed in range(8) for step in range(8)}
    assert len(first) == 64


def test_every_offset_can_be_drawn_and_none_reaches_over_the_end() -> None:
    tokens = np.arange(10, dtype=np.uint16)
    starts = windows(tokens, 0, 0, 2000, 4)[0][:, 0]
    assert set(starts.tolist()) == set(range(6))
    only = windows(tokens, 0, 0, 3, 9)
    assert only[0].tolist() == [list(range(9))] * 3
    assert only[1][0, -1] == 9


def test_uint32_tokens_keep_their_value() -> None:
    tokens = np.arange(100_000, 100_050, dtype=np.uint32)
    assert windows(tokens, 0, 0, 2, 5)[0].min() >= 100_000


@given(
    n_tokens=st.integers(2, 300),
    context_length=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    limit=st.none() | st.integers(1, 400),
)
def test_validation_windows_cover_every_target_once_in_order(
    n_tokens: int, context_length: int, batch_size: int, limit: int | None
) -> None:
    tokens = np.arange(n_tokens, dtype=np.uint16)
    seen: list[int] = []
    for inputs, targets in val_windows(tokens, context_length, batch_size, limit):
        assert inputs.shape == targets.shape
        assert inputs.shape[0] <= batch_size
        assert inputs.shape[1] == context_length
        counted = targets != -100
        assert counted.any(dim=1).all(), "a row of padding alone"
        assert torch.equal(inputs[counted] + 1, targets[counted])
        assert (inputs[~counted] == 0).all()
        seen += targets[counted].tolist()
    n_targets = n_tokens - 1 if limit is None else min(limit, n_tokens - 1)
    assert seen == list(range(1, n_targets + 1))


@pytest.mark.parametrize("tokens", [np.zeros(0, np.uint16), np.zeros(1, np.uint16)])
def test_a_stream_without_targets_has_no_windows(tokens: np.ndarray) -> None:
    assert list(val_windows(tokens, 4, 2)) == []


def test_the_unigram_loss_of_a_worked_example() -> None:
    from types import SimpleNamespace

    from ffnlab.data.token_files import TextTokens

    # After the first mark: 0 twice, 1 once, 2 never; one added to each count makes 3, 2, 1 of 6.
    data = SimpleNamespace(train=np.array([2, 0, 0, 1]), val=np.array([2, 0, 1, 2]), vocab_size=3)
    expected = -(np.log(3 / 6) + np.log(2 / 6) + np.log(1 / 6)) / 3
    assert abs(TextTokens.unigram_loss(data) - expected) < 1e-12
