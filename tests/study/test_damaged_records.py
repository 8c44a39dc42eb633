"""Whatever a crash, a full disk or a person left in a study's records, its other cells have their report."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from synthetic import cell_name, losses, write_study

from ffnlab.errors import UserError
from ffnlab.study import manifest
from ffnlab.study.analyse import analyse
from ffnlab.study.answer import Analysis
from ffnlab.study.cells import look
from ffnlab.study.load import load_curves, load_study
from ffnlab.study.report import as_json
from ffnlab.study.terminal import show
from ffnlab.training.loading import check_records, load_config

SEEDS = range(6)
GONE = object()
WRONG: list[Any] = [None, [], {}, -1, True, 1e308, ["x"], {"x": None}, 10**400, float("nan"), "", GONE]
EACH = 3  # wrong values for each key; which ones differs from key to key
Keys = tuple[str, ...]
RAW = [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[[" * 50_000, b"&a {b: *a}", b"3", b"a: [}", b"{}"]


def keys_of(tree: Any, above: Keys = ()) -> Iterator[Keys]:
    """Every place in a record, sections and single values."""
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


def changed(tree: Any, keys: Keys, value: Any) -> Any:
    key, *rest = keys
    if rest:
        return tree | {key: changed(tree[key], tuple(rest), value)}
    return {k: v for k, v in tree.items() if k != key} if value is GONE else tree | {key: value}


def damages(tree: Any) -> Iterator[Any]:
    for number, keys in enumerate(keys_of(tree)):
        for i in range(EACH):
            yield changed(tree, keys, WRONG[(number + 3 * i) % len(WRONG)])


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "s", losses({"gelu": 0.0, "relu": 0.02}, SEEDS), n_layers=1)


def read_all(study: Path) -> Analysis:
    """All that a report, and a study that goes on, make of the records."""
    for name, entry in manifest.entries(study).items():
        state = look(study / name, entry)
        assert isinstance(state.code + state.data + state.error, str)
        assert state.status != "finished" or isinstance(state.result["val/loss"], float | int)
    analysis = analyse(load_study(study))
    json.dumps(as_json([analysis]), allow_nan=False)
    assert not load_curves(analysis.study).empty
    show(analysis)
    return analysis


def damage_by_turns(study: Path, write: Any, damaged: Iterator[Any]) -> tuple[int, int]:
    """Damage one file of every ReLU cell, each in a way of its own, until all were had: cells read, and left out.

    The GELU cells must have their mean all the same.
    """
    whole, left_out, cells = 0, 0, [cell_name("relu", seed) for seed in SEEDS]
    while group := [way for way, _ in zip(damaged, cells, strict=False)]:
        for cell, way in zip(cells, group, strict=False):
            write(cell, way)
        analysis = read_all(study)
        assert next(arm for arm in analysis.arms if arm.name == "gelu").n == len(SEEDS)
        lost = analysis.study.damaged
        for cell, said in lost.items():
            assert cell in cells
            assert cell in said
            assert "\n" not in said
            assert len(said) < 400
        assert lost.keys() == {cell for p in analysis.problems if p.kind == "damaged" for cell in p.cells}
        whole, left_out = whole + len(group) - len(lost), left_out + len(lost)
    return whole, left_out


@pytest.mark.parametrize("file", ["run.json", "result.json", "config.yaml"])
def test_a_damaged_record_costs_its_own_cell_at_most(study: Path, file: str) -> None:
    text = (study / cell_name("relu", 0) / file).read_text()
    tree = yaml.safe_load(text) if file.endswith("yaml") else json.loads(text)
    tree.pop("hashes", None)  # other hashes are refused, as they should be

    def write(cell: str, way: Any) -> None:
        (study / cell / file).write_bytes(way if isinstance(way, bytes) else dump(way).encode())

    dump = yaml.safe_dump if file.endswith("yaml") else json.dumps
    whole, left_out = damage_by_turns(study, write, iter([*damages(tree), *RAW]))
    assert whole >= 10
    assert left_out >= 10


def test_a_damaged_entry_of_the_study_costs_its_own_cell_at_most(study: Path) -> None:
    content = json.loads((study / "study.json").read_text())
    entry = content["cells"][cell_name("relu", 0)]
    entry["result"] = {key: entry["result"][key] for key in ("val/loss", "steps")}

    def write(cell: str, way: Any) -> None:
        content["cells"][cell] = way
        (study / "study.json").write_text(json.dumps(content))

    whole, left_out = damage_by_turns(study, write, iter([*damages(entry), None, [], 3, "x", {}]))
    assert whole > 0
    assert left_out > 10


def test_damaged_points_are_left_out(study: Path) -> None:
    path = study / cell_name("relu", 0) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    ways = [json.dumps(way).encode() for line in lines[:3] for way in damages(json.loads(line))]

    def write(cell: str, way: bytes) -> None:
        (study / cell / "metrics.jsonl").write_bytes(b"\n".join([way, *map(str.encode, lines)]) + way[:9])

    whole, left_out = damage_by_turns(study, write, iter(ways[::3] + RAW))
    assert left_out == 0
    assert whole > 20


@pytest.mark.parametrize("value", [None, [], "x", GONE])
def test_a_damaged_study_is_read_or_refused_in_a_line(study: Path, value: Any) -> None:
    content = json.loads((study / "study.json").read_text())
    for key in content:
        (study / "study.json").write_text(json.dumps(changed(content, (key,), value)))
        try:
            read_all(study)
        except UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 400


def test_a_result_that_lacks_its_loss_is_damaged(study: Path) -> None:
    run_dir = study / cell_name("relu", 0)
    for content in ("{}", '{"steps": 5}', '{"val/loss": "2"}'):
        (run_dir / "result.json").write_text(content)
        state = look(run_dir, {"status": "finished"})
        assert state.damaged
        assert state.status != "finished"
        with pytest.raises(UserError, match=r"result\.json: .*val/loss.*remove it, then resume"):
            check_records(run_dir)


def test_a_result_whose_loss_is_no_number_is_a_divergence(study: Path) -> None:
    run_dir = study / cell_name("relu", 0)
    (run_dir / "result.json").write_text('{"val/loss": null}')
    assert look(run_dir, {"status": "finished"}).status == "diverged"


def test_a_baseline_whose_cells_are_damaged_is_replaced_and_said(study: Path) -> None:
    for seed in SEEDS:
        (study / cell_name("gelu", seed) / "run.json").write_text("{}")
    analysis = read_all(study)
    assert analysis.study.baseline == "relu"
    assert [p.kind for p in analysis.problems if "gelu" in p.text] == ["damaged", "undeclared"]


def test_cells_that_are_no_folders_names(study: Path) -> None:
    content = json.loads((study / "study.json").read_text())
    entry = content["cells"][cell_name("relu", 0)]
    for name in ("", "..", "a/b", "a\0b", "x" * 300):
        content["cells"][name] = entry
    (study / "study.json").write_text(json.dumps(content))
    assert len(load_study(study).damaged) == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "does not hold a configuration"),
        ("[1]", "does not hold a configuration"),
        ("ffn: [1]", "config.yaml: ffn must be"),
        ("ffn: {_target_: ffnlab.ffn.DenseFFN, activation: relu}", "config.yaml: model is missing"),
        ("a: [}", "not valid YAML in line 1"),
    ],
)
def test_a_damaged_configuration_is_refused_by_file_and_key(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError) as refusal:
        load_config(tmp_path)
    assert words in str(refusal.value)
    assert str(tmp_path / "config.yaml") in str(refusal.value)
