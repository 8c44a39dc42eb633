"""The head's loss a piece at a time is the head's loss."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.model import IGNORE
from ffnlab.model.head_loss import head_loss as loss_of

D, V = 16, 83

chunked = pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in pieces"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts calls of PyTorch's chunked path; where this PyTorch has none, there is nothing to count."""
    seen: list[int] = []
    original = getattr(F, "linear_cross_entropy", None)
    if original is not None:

        def counting(*args, **kwargs):
            seen.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(F, "linear_cross_entropy", counting)
    return seen


def example() -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(4, 25, D, generator=generator, requires_grad=True)
    head = nn.Linear(D, V, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, D, generator=generator))
    targets_BT = torch.randint(V, (4, 25), generator=generator)
    targets_BT[1, 3:9] = IGNORE
    return x_BTD, head, targets_BT


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_pieces_give_the_same_loss_and_gradients(
    reduction: str, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    found = []
    for largest in (10**9, 0):
        monkeypatch.setattr("ffnlab.model.head_loss.LARGEST", largest)
        x_BTD, head, targets_BT = example()
        loss = 3 * loss_of(x_BTD, head, targets_BT, reduction)
        loss.backward()
        found.append((loss.detach(), x_BTD.grad, head.weight.grad))
    for whole, pieces in zip(*found, strict=True):
        assert whole is not None
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))
    assert len(calls) == hasattr(nn, "LinearCrossEntropyOptions")


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffnlab.model.head_loss.LARGEST", 0)
    x_BTD, head, targets_BT = example()
    with torch.no_grad():
        pieces = loss_of(x_BTD, head, targets_BT)
        whole = F.cross_entropy(head(x_BTD).flatten(0, 1), targets_BT.flatten())
    torch.testing.assert_close(pieces, whole)


def test_an_older_pytorch_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffnlab.model.head_loss.LARGEST", 0)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    x_BTD, head, targets_BT = example()
    expected = F.cross_entropy(head(x_BTD).flatten(0, 1), targets_BT.flatten())
    torch.testing.assert_close(loss_of(x_BTD, head, targets_BT), expected)


def test_autocast_is_obeyed(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """The chunked path would compute in float32 there."""
    monkeypatch.setattr("ffnlab.model.head_loss.LARGEST", 0)
    x_BTD, head, targets_BT = example()
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(x_BTD, head, targets_BT)
    assert not calls


def test_small_ones_are_done_at_once(calls: list[int]) -> None:
    loss_of(*example())
    assert not calls
