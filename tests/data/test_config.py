"""The YAML choices and the dataclasses behind them agree, and are cheap to load."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import ffnlab
from ffnlab.data import CopyData, HubData, ShakespeareData, TextData, TokenizerConfig
from ffnlab.data.config import cache_folder
from ffnlab.errors import UserError
from ffnlab.schema import validate

KINDS = {"shakespeare": ShakespeareData, "text": TextData, "hub": HubData, "copy": CopyData}
CONF = Path(ffnlab.__file__).parents[1] / "conf" / "data"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_choice_names_every_key_of_its_kind_and_no_other(path: Path) -> None:
    node = yaml.safe_load(path.read_text(encoding="utf-8"))
    kind = KINDS[node["kind"]]
    assert set(node) == {field.name for field in fields(kind)}
    if "tokenizer" in node:
        assert set(node["tokenizer"]) == {field.name for field in fields(TokenizerConfig)}
    if path.stem == "text":
        node["paths"] = ["a.txt"]
    assert isinstance(validate(kind, node, "data"), kind)


def test_the_five_choices_are_there() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {
        "shakespeare",
        "text",
        "tinystories",
        "wikitext103",
        "copy",
    }


def test_importing_the_schemas_loads_nothing_heavy() -> None:
    code = (
        "import sys, ffnlab.data; "
        "print(sorted({'torch', 'datasets', 'tokenizers', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    root = Path(ffnlab.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_one_path_may_stand_for_a_list() -> None:
    assert validate(TextData, {"paths": "a b.txt"}).paths == ["a b.txt"]
    assert validate(TextData, {"paths": ["a", "b"]}).paths == ["a", "b"]


def test_the_cache_folder_follows_config_then_environment_then_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FFNLAB_CACHE", str(tmp_path / "from environment"))
    assert cache_folder(str(tmp_path / "configured")) == tmp_path / "configured"
    assert cache_folder() == tmp_path / "from environment"
    monkeypatch.delenv("FFNLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ffnlab"


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (TokenizerConfig, {"kind": "word"}, "'bpe', 'bytes' or 'file'"),
        (TokenizerConfig, {"vocab_size": 100}, "at least 257"),
        (TokenizerConfig, {"vocab_size": -1}, "vocab_size must be greater than 0"),
        (TokenizerConfig, {"kind": "file"}, "data.tokenizer.path"),
        (ShakespeareData, {"val_fraction": 0.0}, "between 0 and 1"),
        (ShakespeareData, {"val_fraction": 1.0}, "between 0 and 1"),
        (ShakespeareData, {"val_fractoin": 0.5}, "did you mean val_fraction"),
        (ShakespeareData, {"val_fraction": "much"}, "val_fraction must be a valid number"),
        (TextData, {}, "data.paths=FILE"),
        (TextData, {"paths": [3]}, "paths.0"),
        (TextData, {"paths": ["a"], "val_fraction": -0.1}, "between 0 and 1"),
        (HubData, {}, "data.repo"),
        (HubData, {"repo": "a/b", "max_documents": 0}, "max_documents must be greater than 0"),
        (HubData, {"repo": "a/b", "document_start": "("}, "no regular expression"),
        (CopyData, {"length": 0}, "length must be greater than 0"),
        (CopyData, {"n_symbols": -3}, "n_symbols must be greater than 0"),
        (CopyData, {"n_symbols": 2, "length": 2}, "use at most 2"),
    ],
)
def test_values_that_cannot_work_are_refused(kind: type, values: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as refusal:
        validate(kind, values, "data")
    assert "\n" not in str(refusal.value)
