"""How a step's batch is cut up: every row exactly once, whatever the parts and processes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffnlab.config import compose
from ffnlab.data import prepare
from ffnlab.errors import UserError
from ffnlab.training.batches import Cut, TrainStream, ValStream, order_hash


@given(rows=st.integers(1, 6), parts=st.integers(1, 5), world=st.integers(1, 5))
def test_parts_and_processes_cover_the_batch_once(rows: int, parts: int, world: int) -> None:
    size = rows * parts * world
    taken = [
        index
        for part in range(parts)
        for rank in range(world)
        for index in range(size)[Cut(size, parts, world, rank).rows(part)]
    ]
    assert taken == list(range(size))


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(UserError, match=r"train.batch_size=8 must be a multiple of .* = 3 \* 1"):
        Cut(8, 3, 1, 0)


def test_the_stream_begins_at_the_step_where_the_run_stands() -> None:
    data = prepare(compose(["data=copy"]).data, 128)
    whole = list(itertools.islice(TrainStream(data, 7, Cut(8, 2, 1, 0), lambda: 0), 6))
    later = list(itertools.islice(TrainStream(data, 7, Cut(8, 2, 1, 0), lambda: 2), 2))
    for a, b in zip(whole[4:], later, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    inputs, targets = data.batch(7, 2, 8)
    assert torch.equal(torch.cat([batch[0] for batch in later]), inputs)
    assert torch.equal(torch.cat([batch[1] for batch in later]), targets)


def test_validation_is_shared_out_without_loss() -> None:
    data = prepare(compose(["data=copy"]).data, 128)
    alone = [t for _, t in ValStream(data, 3, None, 1, 0)]
    shared = [t for rank in range(2) for _, t in ValStream(data, 3, None, 2, rank)]
    assert sorted(map(str, alone)) == sorted(map(str, shared))


def test_the_order_hash_tells_seeds_sizes_and_lengths_apart() -> None:
    data = prepare(compose(["data=copy"]).data, 128)
    assert order_hash(data, 0, 8, 10) == order_hash(data, 0, 8, 10)
    assert len({order_hash(data, *what) for what in ((0, 8, 10), (1, 8, 10), (0, 4, 10), (0, 8, 11))}) == 4
