"""BOS, x, SEP, x; loss on the second x; nothing held out is ever trained on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffnlab.data import CopyData, CopyTask, prepare
from ffnlab.errors import UserError


def rows(inputs: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for row in inputs}


@given(
    n_symbols=st.integers(4, 20),
    length=st.integers(3, 10),
    generalise=st.booleans(),
    batch_size=st.integers(1, 40),
    step=st.integers(0, 10_000),
)
def test_a_row_is_bos_x_sep_x_and_only_the_copy_counts(
    n_symbols: int, length: int, generalise: bool, batch_size: int, step: int
) -> None:
    task = CopyTask(CopyData("copy", n_symbols, length, 16, generalise), 64)
    inputs, targets = task.batch(5, step, batch_size)
    assert inputs.shape == targets.shape == (batch_size, 2 * length + 1) == (batch_size, task.context_length)
    x = inputs[:, 1 : length + 1]
    assert (inputs[:, 0] == task.bos).all()
    assert (inputs[:, length + 1] == task.sep).all()
    assert (x < n_symbols).all()
    assert max(task.bos, task.sep) < task.vocab_size
    assert (targets[:, : length + 1] == -100).all()
    assert torch.equal(targets[:, length + 1 :], x)
    assert torch.equal(inputs[:, length + 2 :], x[:, :-1])
    again = task.batch(5, step, batch_size)
    assert torch.equal(again[0], inputs)


def test_fixed_sequences_are_trained_on_and_measured_alike() -> None:
    task = prepare(CopyData(), context_length=32)
    assert isinstance(task, CopyTask)
    val = torch.cat([inputs for inputs, _ in task.val_batches(5)])
    assert len(rows(val)) == len(val) == 32
    full, _ = task.batch(0, 0, 64)
    assert rows(full) == rows(val)
    assert all((full == row).all(dim=1).sum() == 2 for row in val), "two rounds hold each sequence twice"
    assert rows(task.batch(0, 1, 8)[0]) < rows(val)
    assert not torch.equal(task.batch(0, 0, 32)[0], task.batch(1, 0, 32)[0])
    assert not torch.equal(task.batch(0, 0, 32)[0], task.batch(0, 1, 32)[0])


def test_held_out_sequences_never_appear_in_training() -> None:
    """Two symbols and length 5: 32 possible sequences, 16 of them held out, so chance alone would hit them."""
    task = CopyTask(CopyData("copy", n_symbols=2, length=5, n_sequences=16, generalise=True), 11)
    held_out = rows(torch.cat([inputs for inputs, _ in task.val_batches(7)]))
    trained: set[tuple[int, ...]] = set()
    for step in range(30):
        trained |= rows(task.batch(0, step, 16)[0])
    assert len(held_out) == 16
    assert not trained & held_out
    assert len(trained) == 16, "every other sequence comes up"


def test_prompts_end_in_sep_and_answers_are_the_copies() -> None:
    task = CopyTask(CopyData(), 17)
    prompts, answers = task.prompts()
    assert prompts.shape == (32, 10)
    assert (prompts[:, -1] == task.sep).all()
    assert torch.equal(prompts[:, 1:9], answers)


def test_validation_counts_copied_tokens() -> None:
    task = CopyTask(CopyData(), 17)
    counted = sum(int((targets != -100).sum()) for _, targets in task.val_batches(10))
    assert counted == task.n_val_tokens == 32 * 8
    limited = sum(int((targets != -100).sum()) for _, targets in task.val_batches(10, limit_tokens=20))
    assert limited == 24
    assert task.bytes_per_token is None


def test_the_hash_tells_tasks_apart() -> None:
    tasks = [CopyData(), CopyData(generalise=True), CopyData(length=7), CopyData(n_symbols=15)]
    assert len({CopyTask(cfg, 64).hash for cfg in tasks}) == 4
    assert CopyTask(CopyData(), 64).hash == CopyTask(CopyData(), 17).hash


def test_a_context_too_short_for_a_row_is_refused() -> None:
    with pytest.raises(UserError, match="needs 17"):
        prepare(CopyData(), context_length=16)
