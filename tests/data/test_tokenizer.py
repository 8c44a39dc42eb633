"""Every tokenizer gives back its text; BPE sees the training split alone."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from ffnlab.data import TextData, TextTokens, TokenizerConfig, prepare
from ffnlab.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    JsonTokenizer,
    load_tokenizer,
    token_dtype,
    train_bpe,
)
from ffnlab.errors import UserError

TEXT = (
    """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of

foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light.
"""
    * 20
)
BPE = train_bpe([TEXT], 300, "the text")


def most(refusal: UserError) -> int:
    """The vocabulary that a refusal suggests."""
    return int(str(refusal).split("at most ")[1].split(",")[0])


@given(st.text(max_size=400) | st.text(alphabet=" \n\tab\u00e9\u4e2d\U0001f600", max_size=4000))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()], ids=["bpe", "bytes"])
def test_decoding_gives_back_any_text(tokenizer: JsonTokenizer | ByteTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.end_id for i in ids)
    assert tokenizer.encode_documents([text, "x", text])[2].tolist() == ids
    # the mark stands for no text
    assert tokenizer.decode([tokenizer.end_id, *ids, tokenizer.end_id]) == text


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()], ids=["bpe", "bytes"])
def test_a_mark_spelt_out_in_a_text_is_plain_text(tokenizer: JsonTokenizer | ByteTokenizer) -> None:
    ids = tokenizer.encode(f"a {END_OF_DOCUMENT} b")
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == f"a {END_OF_DOCUMENT} b"


def test_bpe_has_the_vocabulary_asked_for_and_saves_it(tmp_path: Path) -> None:
    assert BPE.vocab_size == 300
    BPE.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json", in_pieces=True)
    assert loaded.encode(TEXT) == BPE.encode(TEXT)
    assert (loaded.vocab_size, loaded.end_id) == (300, BPE.end_id)


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path) -> None:
    for name in "ab":
        train_bpe([TEXT], 320, "the text").save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_suggested_vocabulary_is_the_largest_that_works() -> None:
    with pytest.raises(UserError, match="larger than the text supports: use at most") as refusal:
        train_bpe([TEXT], 5000, "the text")
    largest = most(refusal.value)
    assert train_bpe([TEXT], largest, "the text").vocab_size == largest
    with pytest.raises(UserError):
        train_bpe([TEXT], largest + 1, "the text")


def test_tokens_are_two_bytes_where_they_fit() -> None:
    assert token_dtype(65_535).itemsize == 2
    assert token_dtype(65_536).itemsize == 4


def test_bpe_is_trained_on_the_training_split_alone(tmp_path: Path) -> None:
    """Each document repeats a word of its own: one token if BPE saw it, several if it did not."""
    letters = "bcdfghjklmnpqrstvwxz"
    words = [f"{letter}{letters[(n * 7 + 3) % 20]}{letter}u{letter}" for n, letter in enumerate(letters)]
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{" ".join([word] * 60)}"}}\n' for word in words))

    def prepared(vocab_size: int) -> TextTokens:
        cfg = TextData(paths=[str(tmp_path / "d.jsonl")], tokenizer=TokenizerConfig(vocab_size=vocab_size))
        return prepare(cfg, 16, tmp_path / "cache")

    with pytest.raises(UserError) as refusal:
        prepared(5000)
    data = prepared(most(refusal.value))
    val = {int(name.split()[-1]) - 1 for name in data.documents["val"]}
    assert 1 <= len(val) <= 4
    length = {n: len(data.tokenizer.encode(f" {word}")) for n, word in enumerate(words)}
    assert {n for n in length if length[n] == 1} == set(length) - val


def given_tokenizer(path: Path, normalizer: normalizers.Normalizer | None = None) -> Path:
    vocabulary = {"<unk>": 0, "</s>": 1, **{chr(97 + n): n + 2 for n in range(26)}, " ": 28, ".": 29, "\n": 35}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_special_tokens(["</s>"])
    inner.enable_truncation(8)  # a file made for classification: what is said there must not cut a corpus
    inner.save(str(path))
    return path


def from_file(tmp_path: Path, text: str, tokenizer: Path):
    (tmp_path / "t.txt").write_text(text)
    cfg = TextData(paths=[str(tmp_path / "t.txt")], tokenizer=TokenizerConfig(kind="file", path=str(tokenizer)))
    return prepare(cfg, 16, tmp_path / "cache")


def test_a_given_tokenizer_is_used_with_its_own_end_mark(tmp_path: Path) -> None:
    data = from_file(tmp_path, "one two three.\n" * 50, given_tokenizer(tmp_path / "tokenizer.json"))
    assert data.vocab_size == 36, "a row for the highest id, gaps included"
    assert data.train[0] == data.train[-1] == data.tokenizer.end_id == 1
    assert len(data.train) + len(data.val) == 15 * 50 + 4


def test_an_end_mark_is_added_where_there_is_none(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1, "\n": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    data = from_file(tmp_path, "ab\n" * 50, tmp_path / "tokenizer.json")
    assert (data.tokenizer.end_id, data.vocab_size) == (3, 4)


def test_a_tokenizer_that_changes_the_text_gets_no_bits_per_byte(tmp_path: Path) -> None:
    text = "One Two Three.\n" * 50
    lossy = given_tokenizer(tmp_path / "lossy.json", normalizers.Lowercase())
    data = from_file(tmp_path, text, lossy)
    assert data.bytes_per_token is None
    assert from_file(tmp_path, "ab\n" * 50, made_of_bytes(tmp_path)).bytes_per_token is not None


def made_of_bytes(tmp_path: Path) -> Path:
    BPE.save(tmp_path / "bpe.json")
    return tmp_path / "bpe.json"


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", bytes(range(128, 200)), b'{"model": 3}'])
def test_a_bad_tokenizer_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer\.json") as refusal:
        from_file(tmp_path, TEXT, tmp_path / "bad.json")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists()


def test_a_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no tokenizer file"):
        from_file(tmp_path, TEXT, tmp_path / "none.json")
