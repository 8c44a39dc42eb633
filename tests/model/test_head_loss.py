"""The head's loss in place, and a piece at a time, is the head's loss."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.model import IGNORE
from ffnlab.model.head_loss import head_loss as loss_of

D, V = 16, 83


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


# -- in place ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffnlab.model.head_loss.LARGE", 0)


def reference(x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(head(x_BTD).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction=reduction)


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["moderate", "certain"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 6, 99])
def test_in_place_gives_the_same_loss_and_gradients(ignored: int, reduction: str, scale: float, in_place: None) -> None:
    """Also where most probabilities are zero, and their logarithms far from it."""
    found = []
    for way in (reference, loss_of):
        x_BTD, head, targets_BT = example()
        targets_BT[:] = targets_BT.clamp_min(0)
        targets_BT.view(-1)[:ignored] = IGNORE
        with torch.no_grad():
            head.weight.mul_(scale)
        loss = 3 * way(x_BTD, head, targets_BT, reduction)
        loss.backward()
        found.append((loss.detach(), x_BTD.grad, head.weight.grad))
    for expected, got in zip(*found, strict=True):
        assert expected is not None
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def test_in_place_where_nothing_counts(in_place: None) -> None:
    """A mean over nothing is no number, a sum over nothing is zero, as PyTorch has it."""
    x_BTD, head, targets_BT = example()
    targets_BT[:] = IGNORE
    assert bool(loss_of(x_BTD, head, targets_BT).isnan())
    assert loss_of(x_BTD, head, targets_BT, "sum").item() == 0.0


def test_in_place_does_not_hide_what_is_not_finite(in_place: None) -> None:
    for bad in (float("nan"), float("inf")):
        x_BTD, head, targets_BT = example()
        with torch.no_grad():
            x_BTD[0, 0, 0] = bad
        assert not bool(torch.isfinite(loss_of(x_BTD, head, targets_BT)))


def test_in_place_a_second_backward_pass_is_refused(in_place: None) -> None:
    """The probabilities are gone; without an error the gradients would be wrong."""
    loss = loss_of(*example())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_one_buffer_of_logits_is_saved(in_place: None) -> None:
    def saved(way) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() if tensor.numel() >= 100 * V else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            way(*example())
        return sum(sizes)

    assert saved(loss_of) == 100 * V


def test_in_place_frozen_parts_get_no_gradient(in_place: None) -> None:
    x_BTD, head, targets_BT = example()
    head.weight.requires_grad_(False)
    loss_of(x_BTD, head, targets_BT).backward()
    assert head.weight.grad is None
    assert x_BTD.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_single(dtype: torch.dtype) -> None:
    """Thousands of losses summed in bfloat16 are rounded to a multiple of 64, and a validation loss with them."""
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(40, 50, D, generator=generator).to(dtype)
    head = nn.Linear(D, V, bias=False).to(dtype)
    targets_BT = torch.randint(V, (40, 50), generator=generator)
    exact = F.cross_entropy(head(x_BTD).double().flatten(0, 1), targets_BT.flatten(), reduction="sum")
    loss = loss_of(x_BTD, head, targets_BT, "sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_in_place_a_target_that_is_no_token_is_refused(in_place: None) -> None:
    """Of the negative ones only -100 stands for nothing."""
    x_BTD, head, targets_BT = example()
    targets_BT[0, 0] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss_of(x_BTD, head, targets_BT)


def test_a_reduction_that_not_every_way_has_is_refused() -> None:
    x_BTD, head, targets_BT = example()
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', not 'none'"):
        loss_of(x_BTD, head, targets_BT, "none")


def test_in_place_a_mean_over_no_target_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffnlab.model.head_loss.LARGE", 0)
    x_BTD, head, targets_BT = example()
    loss = loss_of(x_BTD, head, torch.full_like(targets_BT, IGNORE), "mean")
    loss.backward()
    assert loss.isnan()  # as F.cross_entropy says it
    assert x_BTD.grad is not None
    assert not x_BTD.grad.any()
    assert not head.weight.grad.any()


def test_in_place_logits_with_a_large_offset_lose_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    x_BTD, head, targets_BT = example()
    with torch.no_grad():
        x_BTD[..., 0], head.weight[:, 0] = 1e3, 1e2  # 1e5 in every logit
    exact = F.cross_entropy((x_BTD.double() @ head.weight.double().t()).flatten(0, 1), targets_BT.flatten())
    monkeypatch.setattr("ffnlab.model.head_loss.LARGE", 0)
    with torch.no_grad():
        ours = loss_of(x_BTD, head, targets_BT)
        theirs = F.cross_entropy(head(x_BTD).flatten(0, 1), targets_BT.flatten())
    assert abs(float(ours - exact)) <= 1.1 * abs(float(theirs - exact)) + 1e-5
