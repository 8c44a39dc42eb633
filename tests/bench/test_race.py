"""The arithmetic of a race, on records made by hand."""

import json
import multiprocessing
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from ffnlab.bench.measure import measure
from ffnlab.bench.race import Race, Record, Spread, run_race
from ffnlab.bench.report import Report, print_report, write_json
from ffnlab.bench.setting import Setting
from ffnlab.bench.split import REST, Split, kind_of
from ffnlab.bench.targets import judge
from ffnlab.errors import UserError


def race(**seconds: list[float]) -> Race:
    records = {}
    for name, values in seconds.items():
        name = name.replace("_", "-")
        validated = [name == "ffnlab" and i == 2 for i in range(len(values))]
        facts = {"peak_bytes": 2**20}
        if name == "products":
            facts |= {"flops": 10**9, "step_flops": 12 * 10**8, "square_flops_per_s": 4e9}
        records[name] = Record(name, facts, values, validated)
    return Race(Setting("nanogpt-cpu"), 10, 768, records)


def example() -> Race:
    # The machine is half as fast in the second turn, for everybody; the third holds ffnlab's validation.
    return race(
        ffnlab=[1.0, 2.0, 9.0, 1.0],
        bare=[0.9, 1.8, 0.9, 0.9],
        gpt2=[1.5, 3.0, 1.5, 1.5],
        x_transformers=[1.1, 2.2, 1.1, 1.1],
        products=[0.6, 1.2, 0.6, 0.6],
    )


def test_speeds_are_compared_turn_by_turn() -> None:
    speed = example().speed("ffnlab", "gpt2")
    assert (speed.low, speed.median, speed.high) == pytest.approx((1.5, 1.5, 1.5))
    assert example().speed("ffnlab", "bare").median == pytest.approx(0.9)
    assert example().ms_per_step("bare").median == pytest.approx(90)


def test_validation_is_left_out_of_steps_and_told_apart() -> None:
    assert example().ms_per_step("ffnlab").median == pytest.approx(100)
    assert example().validation_seconds("ffnlab") == pytest.approx(8.0)
    assert race(bare=[1.0, 1.0]).validation_seconds("bare") is None


def test_only_validations_cannot_be_compared() -> None:
    only = Race(Setting("tiny"), 10, 768, {"ffnlab": Record("ffnlab", {}, [1.0], [True])})
    with pytest.raises(UserError, match=r"shorter than train\.val_every"):
        only.ms_per_step("ffnlab")


def test_targets() -> None:
    judged = {target.what: target for target in judge(example())}
    assert not judged["ffnlab / bare"].met  # 0.9, wanted 0.98
    assert judged["ffnlab / gpt2"].met  # 1.5, wanted 1.35
    assert not judged["ffnlab / x-transformers"].met  # 1.1, wanted 1.15
    share = judged["rate of the products alone"]
    assert share.measured.median == pytest.approx(0.6)
    assert not share.met  # wanted 0.65


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4, 1, 2, 3, 5]) == Spread(3, 2, 4)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused attention"),
        ("aten::gelu_backward", "activation"),
        ("aten::_log_softmax", "softmax and cross-entropy"),
        ("aten::bmm", "matrix products"),
        ("aten::native_layer_norm", "norms"),
        ("aten::_fused_adamw_", "optimiser and clipping"),
        ("aten::add_", "additions and products by element"),
        ("aten::transpose", REST),
    ],
)
def test_kernels_by_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_the_largest_part_that_is_no_product() -> None:
    split = Split({}, {"matrix products": 9.0, "fused attention": 1.0, "norms": 2.0})
    assert split.largest_other == "norms"


def test_report_says_all_and_writes_it(tmp_path: Path) -> None:
    split = Split({"data": Spread(1, 1, 2)}, {"matrix products": 9.0, "fused attention": 1.0, "norms": 2.0})
    report = Report(races=[example()], splits={"tiny": split}, startup={"python train.py --help": Spread(1, 1, 1)})
    console = Console(record=True, width=140, quiet=False)
    print_report(report, console)
    text = console.export_text()
    assert "missed ffnlab / bare: 0.900" in text
    assert "met    ffnlab / gpt2: 1.500" in text
    assert "8.00 s every 250 steps" in text
    assert "norms  <- largest" in text
    assert "MFU" in text
    write_json(report, tmp_path / "deep" / "bench.json")
    written = json.loads((tmp_path / "deep" / "bench.json").read_text())
    assert written["races"][0]["records"]["bare"]["seconds"] == [0.9, 1.8, 0.9, 0.9]
    assert written["splits"]["tiny"]["largest_other"] == "norms"


def test_an_unknown_contender() -> None:
    with pytest.raises(UserError, match="unknown contender 'gpt5'; choose one of ffnlab, bare"):
        run_race(["gpt5"], Setting("tiny"), 1, 1)


@pytest.mark.slow
def test_a_contender_that_fails_is_named_and_leaves_nothing_behind() -> None:
    missing = ["data=text", "data.paths=['/nowhere.txt']"]
    with pytest.raises(UserError, match=r"^bare: UserError: .*/nowhere.txt"):
        run_race(["bare"], Setting("tiny", overrides=missing), 1, 1)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("bench-")]


def test_a_peer_that_is_not_installed_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffnlab.bench.contenders.find_spec", lambda package: None)
    monkeypatch.setattr("ffnlab.bench.race._Worker", None)
    with pytest.raises(UserError, match=r"gpt2 needs transformers: pip install -e '\.\[bench\]'"):
        run_race(["bare", "gpt2"], Setting("tiny"), 1, 1)


def test_the_usual_contenders_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    raced, said = [], []
    monkeypatch.setattr("ffnlab.bench.contenders.find_spec", lambda package: None if "x_" in package else package)
    monkeypatch.setattr("ffnlab.bench.measure.run_race", lambda names, *rest: raced.append(names))
    bench = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "bench.py"))
    measure(bench["parse"](["--parts", "race", "--shapes", "tiny", "--device", "cpu"]), said.append)
    assert raced == [["ffnlab", "bare", "gpt2", "gpt2-gelu", "products"]]
    assert any(line.startswith("left out: x-transformers needs x_transformers") for line in said)
