"""Splits are by document, deterministic, near the share asked for, and keep equal texts together."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ffnlab.data.splits import Document, cut_position, split_documents


def split(texts: list[str], val_fraction: float = 0.1) -> tuple[list[str], list[str]]:
    def documents() -> Iterator[Document]:
        return (Document(f"d{number}", text) for number, text in enumerate(texts))

    train, val = split_documents(documents, val_fraction)
    return [document.text for document in train()], [document.text for document in val()]


MANY = [f"document number {n} of many\n" * 5 for n in range(60)]


def test_whole_documents_go_to_one_side_each_in_their_order() -> None:
    train, val = split(MANY)
    assert sorted(train + val) == sorted(MANY)
    assert not set(train) & set(val)
    assert len(val) == 6
    assert train == [text for text in MANY if text in train]


def test_file_order_plays_no_part_and_equal_texts_stay_together() -> None:
    _, val = split(MANY)
    _, val_reversed = split(MANY[::-1])
    assert set(val) == set(val_reversed)
    train, val = split(MANY * 3)
    assert not set(train) & set(val)


def test_one_more_document_leaves_the_others_nearly_where_they_were() -> None:
    _, before = split(MANY)
    _, after = split([*MANY, "a new one\n" * 9])
    assert len(set(before) - set(after)) <= 1


def test_a_lone_document_is_cut_near_its_end_at_a_line_end() -> None:
    text = "".join(f"line {n}\n" for n in range(500))
    (head,), (tail,) = split([text])
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.09 < len(tail) / len(text) < 0.12


def test_unequal_documents_are_cut_rather_than_unbalanced() -> None:
    big, note = "a long book line\n" * 5000, "a note\n" * 10
    train, val = split([big, note])
    assert len(train) == len(val) == 2
    assert 0.09 < len("".join(val)) / len(big + note) < 0.12
    assert train[0] + val[0] == big


@given(st.text(max_size=300), st.floats(0.01, 0.99))
def test_a_cut_loses_nothing_and_keeps_about_the_share(text: str, val_fraction: float) -> None:
    at = cut_position(text, val_fraction)
    assert 0 <= at <= len(text)
    assert len(text) - at <= 2 * val_fraction * len(text) + 2


@given(st.lists(st.text(max_size=50), max_size=12), st.floats(0.05, 0.9))
def test_nothing_is_lost_or_doubled(texts: list[str], val_fraction: float) -> None:
    train, val = split(texts, val_fraction)
    assert sorted("".join(train + val)) == sorted("".join(texts))
