"""A check that passes a broken block is a bug: each fault fails, by the right name, and by no other."""

import pytest
from faulty_blocks import FAULTS, Dense, Gated, WithDropout

from ffnlab.contract import ITEMS, check


@pytest.mark.parametrize("block", [Dense, Gated, WithDropout])
def test_the_right_block_under_the_faults_passes(block: type) -> None:
    assert check(block).failed == []


@pytest.mark.parametrize("block", FAULTS, ids=lambda cls: cls.__name__)
def test_each_fault_fails_by_name_and_alone(block: type) -> None:
    options, expected = FAULTS[block]
    report = check(block, options)
    assert not report.passed
    assert set(report.failed) == expected, report.text()
    for outcome in report.outcomes:
        assert outcome.measured
        assert outcome.fix or outcome.status != "fail"


def test_every_item_has_a_fault_that_only_it_or_few_others_catch() -> None:
    caught = set().union(*(items for _, items in FAULTS.values()))
    assert caught == {"builds", *ITEMS}
