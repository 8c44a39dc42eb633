"""The plays, a user's own files, and sets in the hub's form."""

import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ffnlab.data import HubData, ShakespeareData, TextData, TextTokens, TokenizerConfig, prepare
from ffnlab.data.corpora import open_corpus, strip_marks
from ffnlab.errors import UserError

BYTES = TokenizerConfig(kind="bytes")


def read(tmp_path: Path, *paths: Path | str, context_length: int = 16, **options) -> TextTokens:
    options.setdefault("tokenizer", BYTES)
    cfg = TextData(paths=[str(path) for path in paths], **options)
    return prepare(cfg, context_length, tmp_path / "cache")


def texts(data: TextTokens) -> set[str]:
    """The documents of both splits, cut apart at the marks."""
    out = set()
    for tokens in (data.train, data.val):
        assert tokens[0] == tokens[-1] == data.tokenizer.end_id
        marks = np.flatnonzero(np.asarray(tokens) == data.tokenizer.end_id)
        for start, end in pairwise(marks):
            out.add(data.tokenizer.decode(tokens[start + 1 : end].tolist()))
    return out


# ---- the plays ----


def test_marks_are_stripped_to_plain_text() -> None:
    play = "# Hamlet\n\n## ACT I\n\n_Enter GHOST_\n\n**HAMLET**  \nTo be, \\--or not  \n__\\[Dies]_  \n*Exeunt.*\n"
    plain = "Hamlet\n\nACT I\n\nEnter GHOST\n\nHAMLET\nTo be, --or not\n[Dies]\nExeunt.\n"
    assert strip_marks(play) == plain


def test_the_default_corpus_is_38_plays_of_plain_text() -> None:
    plays = list(open_corpus(ShakespeareData()).documents())
    assert len(plays) == len({play.name for play in plays}) == 38
    assert [play.name for play in plays] == sorted(play.name for play in plays)
    assert 4_900_000 < sum(len(play.text) for play in plays) < 5_300_000
    for play in plays:
        assert not re.search(r"[*_\\#]|[ \t]$", play.text, flags=re.MULTILINE)
    assert "To be, or not to be: that is the question:" in dict(plays)["hamlet"]


@pytest.mark.slow
def test_the_default_corpus_prepares_as_documented(tmp_path: Path) -> None:
    data = prepare(ShakespeareData(), 128, tmp_path)
    assert data.vocab_size == 2048
    assert data.train.dtype == np.uint16
    assert {split: len(names) for split, names in data.documents.items()} == {"train": 34, "val": 4}
    assert len(data.train) > 1_500_000
    assert data.n_val_tokens > 150_000
    plays = dict(open_corpus(ShakespeareData()).documents())
    assert texts(data) == set(plays.values())
    assert data.val_bytes == sum(len(plays[name].encode()) for name in data.documents["val"])
    assert data.bytes_per_token == data.val_bytes / (len(data.val) - 1)


# ---- a user's own files ----


def test_text_files_of_any_name_are_documents(tmp_path: Path) -> None:
    folder = tmp_path / "Mes données [été] 中文 50%"
    folder.mkdir()
    written = {f"Datei {n}: naïve café 中 😀\n" * 3 for n in range(12)}
    for n, text in enumerate(sorted(written)):
        (folder / f"file {n} ü [x] #1.txt").write_text(text, encoding="utf-8")
    escaped = str(folder).replace("[", "[[]")
    cfg = TextData(paths=[f"{escaped}/*.txt"], tokenizer=BYTES, cache_dir=str(folder / "my cäche"))
    data = prepare(cfg, 16)
    assert texts(data) == written
    assert (folder / "my cäche").is_dir()
    direct = read(tmp_path, *sorted(folder.glob("*.txt")))
    assert texts(direct) == written


def test_jsonl_and_parquet_hold_a_document_a_row(tmp_path: Path) -> None:
    rows = [f"Row {n} says ünïcode 中\nover two lines" for n in range(40)]
    lines = [json.dumps({"id": n, "body": row}, ensure_ascii=n % 2 == 0) for n, row in enumerate(rows)]
    (tmp_path / "r.jsonl").write_text("\n".join([*lines, '{"id": 99, "body": null}']), encoding="utf-8")
    pq.write_table(pa.table({"body": [*rows, None, "  "]}), tmp_path / "r.parquet")
    from_json = read(tmp_path, tmp_path / "r.jsonl", text_column="body")
    from_parquet = read(tmp_path, tmp_path / "r.parquet", text_column="body")
    assert texts(from_json) == texts(from_parquet) == set(rows)
    assert from_json.n_documents == from_parquet.n_documents == {"train": 36, "val": 4}
    assert from_json.hash == from_parquet.hash, "the same tokens are the same data"


def test_mixed_files_and_globs_count_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for n in range(9):
        (tmp_path / "a" / "b" / f"{n}.txt").write_text(f"text {n}\n" * 3)
    (tmp_path / "a" / "b" / ".hidden.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "r.jsonl").write_text('{"text": "row one"}\n{"text": "row two"}\n')
    data = read(tmp_path, tmp_path / "a/**/*.txt", tmp_path / "r.jsonl", tmp_path / "a/b/3.txt")
    assert texts(data) == {f"text {n}\n" * 3 for n in range(9)} | {"row one", "row two"}
    assert sum(data.n_documents.values()) == 11


def test_bytes_and_targets_are_counted_exactly(tmp_path: Path) -> None:
    """A uniform model costs ln V nats a target; its bits over the bytes follow by hand."""
    rows = [f"naïve {n} 中" * (n % 5 + 1) for n in range(50)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = read(tmp_path, tmp_path / "r.jsonl")
    val = [rows[int(name.split()[-1]) - 1] for name in data.documents["val"]]
    n_bytes = sum(len(row.encode()) for row in val)
    assert data.val_bytes == n_bytes
    assert data.n_val_tokens == n_bytes + len(val), "each byte and each document's end is a target"
    counted = sum(int((targets != -100).sum()) for _, targets in data.val_batches(3))
    assert counted == data.n_val_tokens
    assert data.bytes_per_token is not None
    bpb = math.log(257) / math.log(2) / data.bytes_per_token
    assert bpb == pytest.approx((n_bytes + len(val)) * math.log2(257) / n_bytes)


def test_the_data_follow_content_and_settings_not_names(tmp_path: Path) -> None:
    text = "".join(f"A line of text, number {n}.\n" for n in range(300))
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(text)
    one, two = read(tmp_path, tmp_path / "one.txt"), read(tmp_path, tmp_path / "two.txt", context_length=8)
    assert one.hash == two.hash
    assert read(tmp_path, tmp_path / "one.txt", val_fraction=0.2).hash != one.hash
    bpe = read(tmp_path, tmp_path / "one.txt", tokenizer=TokenizerConfig(vocab_size=270))
    assert bpe.hash != one.hash
    assert texts(bpe) == texts(one)
    (tmp_path / "one.txt").write_text(text + "more\n")
    assert read(tmp_path, tmp_path / "one.txt").hash != one.hash


def test_batches_come_from_the_training_split(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a" * 900 + "\n" + "b" * 100)
    data = read(tmp_path, tmp_path / "t.txt")
    inputs, targets = data.batch(0, 3, 64)
    assert inputs.shape == (64, 16)
    assert ord("b") not in set(inputs.flatten().tolist()) | set(targets.flatten().tolist())
    assert ord("a") not in data.val.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig(vocab_size=270)], ids=["bytes", "bpe"])
@pytest.mark.parametrize("shape", ["a million short lines", "one endless line", "one endless word"])
def test_texts_of_odd_shapes_work(tmp_path: Path, shape: str, tokenizer: TokenizerConfig) -> None:
    rng = random.Random(0)
    if shape == "a million short lines":
        text = "".join(f"{n % 9973}\n" for n in range(1_000_000))
    elif shape == "one endless line":
        text = " ".join(rng.choices(["alpha", "beta", "gamma", "dé"], k=300_000))
    else:
        text = "".join(rng.choices("abcdefgh", k=500_000))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    data = read(tmp_path, tmp_path / "t.txt", tokenizer=tokenizer)
    parts = [data.tokenizer.decode(np.asarray(tokens[1:-1]).tolist()) for tokens in (data.train, data.val)]
    assert "".join(parts) == text
    assert 0.05 < data.val_bytes / len(text.encode()) < 0.2


# ---- what is refused ----


def refused(tmp_path: Path, *paths: Path | str, **options) -> str:
    with pytest.raises(UserError) as refusal:
        read(tmp_path, *paths, **options)
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 400
    cache = tmp_path / "cache"
    assert not cache.exists() or not [path for path in cache.iterdir() if path.suffix != ".lock"]
    return message


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"good \xe9 bad", 5),
        (b"ends in the middle \xe4\xb8", 19),
        (b"x" * (1 << 20) + b"\xff", 1 << 20),
        (b"x" * ((1 << 20) - 1) + b"\xc3(", (1 << 20) - 1),
        ("utf-16".encode("utf-16-le") + b"\xff\xd8", 12),
        (b"\xff" + random.Random(0).randbytes(5000), 0),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_its_offset(tmp_path: Path, content: bytes, offset: int) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    message = refused(tmp_path, tmp_path / "bad.txt")
    assert f"bad.txt is not UTF-8 text: byte {offset} " in message
    with pytest.raises(UnicodeDecodeError) as error:
        content.decode()
    assert error.value.start == offset


def test_a_character_across_two_chunks_is_fine(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"x" * ((1 << 20) - 1) + "é\n".encode() * 100)
    assert read(tmp_path, tmp_path / "t.txt").val_bytes > 100_000


def test_missing_and_empty_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n ")
    assert "there is no file" in refused(tmp_path, tmp_path / "none.txt")
    assert "no file matches" in refused(tmp_path, tmp_path / "*.md")
    assert "is a folder" in refused(tmp_path, tmp_path)
    assert "empty.txt is empty" in refused(tmp_path, tmp_path / "empty.txt")
    assert "blank.txt holds no text" in refused(tmp_path, tmp_path / "blank.txt")


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig()], ids=["bytes", "bpe"])
def test_a_text_too_short_for_one_context_is_refused(tmp_path: Path, tokenizer: TokenizerConfig) -> None:
    (tmp_path / "t.txt").write_text("short\n" * 4)
    message = refused(tmp_path, tmp_path / "t.txt", tokenizer=tokenizer, context_length=64)
    assert "t.txt is too short" in message
    assert "65" in message


def test_a_text_just_long_enough_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 10 + "\n" + "y" * 10)
    data = read(tmp_path, tmp_path / "t.txt", val_fraction=0.4, context_length=12)
    assert len(data.train) == 13
    with pytest.raises(UserError, match="one context needs 14"):
        read(tmp_path, tmp_path / "t.txt", val_fraction=0.4, context_length=13)


def test_rows_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"body": "a", "id": 3}\n')
    (tmp_path / "n.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{oops\n')
    (tmp_path / "p.parquet").write_text("this is no parquet")
    assert "set data.text_column to one of body, id" in refused(tmp_path, tmp_path / "r.jsonl")
    assert "holds int, not text" in refused(tmp_path, tmp_path / "n.jsonl")
    assert "b.jsonl cannot be read as json" in refused(tmp_path, tmp_path / "b.jsonl")
    assert "p.parquet cannot be read as parquet" in refused(tmp_path, tmp_path / "p.parquet")


def test_a_vocabulary_larger_than_the_text_supports_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a few words, again and again\n" * 30)
    message = refused(tmp_path, tmp_path / "t.txt", tokenizer=TokenizerConfig())
    assert "vocab_size=2048 is larger than" in message
    assert "t.txt supports: use at most" in message


# ---- the hub's form ----


@pytest.fixture
def hub_set(tmp_path: Path) -> Path:
    repo = tmp_path / "a set"
    (repo / "data").mkdir(parents=True)
    for split, count in (("train", 50), ("validation", 10)):
        rows = [
            row
            for n in range(count)
            for row in (f" = {split} {n} = \n", "", " = = part = = \n", f"line of {split} {n}\n")
        ]
        pq.write_table(pa.table({"text": rows}), repo / "data" / f"{split}-00000-of-00001.parquet")
    return repo


def test_lines_of_running_text_become_documents(tmp_path: Path, hub_set: Path) -> None:
    cfg = HubData(repo=str(hub_set), document_start="^ = [^=]", tokenizer=BYTES)
    data = prepare(cfg, 16, tmp_path / "cache")
    assert data.n_documents == {"train": 50, "val": 10}
    assert " = train 3 = \n\n = = part = = \nline of train 3\n" in texts(data)
    few = prepare(HubData(repo=str(hub_set), max_documents=7, tokenizer=BYTES), 16, tmp_path / "cache")
    assert few.n_documents == {"train": 7, "val": 7}


def test_a_set_without_a_validation_split_is_split(tmp_path: Path, hub_set: Path) -> None:
    cfg = HubData(repo=str(hub_set), document_start="^ = [^=]", val_split=None, tokenizer=BYTES)
    assert prepare(cfg, 16, tmp_path / "cache").n_documents == {"train": 45, "val": 5}


def test_wrong_splits_and_columns_of_a_set_are_said(tmp_path: Path, hub_set: Path) -> None:
    for options, says in (
        ({"val_split": "dev"}, "split dev"),
        ({"text_column": "body"}, "set data.text_column to one of text"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(HubData(repo=str(hub_set), tokenizer=BYTES, **options), 16, tmp_path / "cache")


def test_an_empty_validation_split_is_refused(tmp_path: Path, hub_set: Path) -> None:
    pq.write_table(pa.table({"text": ["", " "]}), hub_set / "data" / "validation-00000-of-00001.parquet")
    with pytest.raises(UserError, match="leaves no text for validation"):
        prepare(HubData(repo=str(hub_set), tokenizer=BYTES), 16, tmp_path / "cache")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_the_hub_out_of_reach_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", endpoint)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("must not even be tried"))
    with pytest.raises(UserError, match=r"cannot reach the hub .* for roneneldan/TinyStories") as refusal:
        prepare(HubData(repo="roneneldan/TinyStories"), 16, tmp_path / "cache")
    assert "data=text" in str(refusal.value)


def test_a_prepared_set_needs_the_hub_no_more(tmp_path: Path, hub_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = HubData(repo=str(hub_set), tokenizer=BYTES)
    before = prepare(cfg, 16, tmp_path / "cache")
    monkeypatch.setattr("ffnlab.data.corpora.open_hub", lambda *_: pytest.fail("the token files are there"))
    assert prepare(cfg, 16, tmp_path / "cache").hash == before.hash
