import json
from pathlib import Path

import pytest
import yaml
from faulty_blocks import Dense, WithDropout
from torch import nn

from ffnlab.contract import ITEMS, Finding, check
from ffnlab.ffn import DenseFFN, GatedFFN, locate

CHOICES = sorted((Path(__file__).parents[2] / "conf" / "ffn").glob("*.yaml"))


def shipped(path: Path) -> tuple[type[nn.Module], dict[str, object]]:
    options = yaml.safe_load(path.read_text())
    options.pop("down_init", None)
    return locate(options.pop("_target_")), options


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
@pytest.mark.parametrize("changes", [{}, {"bias": True, "dropout_hidden": 0.1, "dropout_output": 0.2}], ids=["", "all"])
def test_every_shipped_choice_passes(path: Path, changes: dict[str, object]) -> None:
    cls, options = shipped(path)
    report = check(cls, options | changes, name=path.stem)
    assert report.passed, report.text()


def test_there_are_choices() -> None:
    assert {"relu", "gelu", "swiglu"} <= {path.stem for path in CHOICES}


@pytest.mark.parametrize(("d_model", "d_ff"), [(8, 24), (96, 256), (10, 7)])
def test_the_verdict_does_not_depend_on_the_size(d_model: int, d_ff: int) -> None:
    for cls in (DenseFFN, GatedFFN):
        report = check(cls, {}, d_model=d_model, d_ff=d_ff)
        assert report.passed, report.text()


def test_learned_beta_passes() -> None:
    report = check(DenseFFN, {"activation": "swish", "learn_beta": True, "beta": 0.7})
    assert report.passed, report.text()


def test_items_that_do_not_apply_are_neither_passed_nor_failed() -> None:
    status = {outcome.name: outcome.status for outcome in check(Dense).outcomes}
    assert [name for name in status if status[name] == "n/a"] == [
        "formula",
        "pre-activation",
        "gate side",
        "dropout",
        "bias",
    ]


def test_an_item_that_crashes_fails_alone_and_names_the_line() -> None:
    def crashes(_subject: object) -> Finding:
        raise KeyError("nobody home")

    report = check(Dense, items={"crashes": crashes, "shapes": ITEMS["shapes"]})
    assert report.failed == ["crashes"]
    assert "KeyError" in report.outcomes[1].measured
    assert "test_check.py:" in report.outcomes[1].fix


def test_the_dropout_of_a_users_own_module_is_measured() -> None:
    class Own(Dense):
        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__(d_model, d_ff)
            self.dropout = nn.Dropout(0.2)

        def forward(self, x):
            return self.dropout(super().forward(x))

    outcome = {o.name: o for o in check(Own).outcomes}["dropout"]
    assert outcome.status == "pass"
    assert "standard errors" in outcome.measured


def test_half_precision_says_what_is_largest() -> None:
    outcome = {o.name: o for o in check(Dense, items={"half precision": ITEMS["half precision"]}).outcomes}
    assert outcome["half precision"].measured.startswith("finite; largest output ")


def test_the_check_leaves_the_random_stream_alone() -> None:
    import torch

    before = torch.get_rng_state()
    check(WithDropout, items={"dropout": ITEMS["dropout"]})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_report_reads_by_people_and_machines() -> None:
    report = check(DenseFFN, {"activation": "gelu"}, name="gelu")
    assert report.text().splitlines()[-1].startswith("gelu keeps the contract: 23 of 23 items pass")
    assert len(report.text().splitlines()) == 2 + 1 + len(ITEMS)
    data = json.loads(report.json())
    assert data["passed"] is True
    assert data["failed"] == []
    assert [item["name"] for item in data["items"]] == ["builds", *ITEMS]
