"""Attention by whole matrices is attention by PyTorch's fused kernel."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ffnlab.model import ModelConfig
from ffnlab.model.attention import SHORT, CausalSelfAttention, attend_whole


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that the fused kernel was called with."""
    seen: list[int] = []
    original = F.scaled_dot_product_attention

    def counting(query: Tensor, *args, **kwargs) -> Tensor:
        seen.append(query.shape[-2])
        return original(query, *args, **kwargs)

    monkeypatch.setattr("ffnlab.model.attention.F.scaled_dot_product_attention", counting)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 33, 128])
def test_whole_matrices_give_the_same_output_and_gradients(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    packed = torch.randn(3, length, 3 * 4 * 8, generator=generator, dtype=dtype)
    upstream = torch.randn(3, 4, length, 8, generator=generator, dtype=dtype)
    future = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
    found = []
    for attend in (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: attend_whole(q, k, v, future),
    ):
        leaf = packed.clone().requires_grad_()
        q, k, v = (part.view(3, length, 4, 8).transpose(1, 2) for part in leaf.split(32, dim=-1))
        mixed = attend(q, k, v)
        mixed.backward(upstream)
        assert leaf.grad is not None
        found.append((mixed.detach(), leaf.grad))
    for fused, whole in zip(*found, strict=True):
        torch.testing.assert_close(whole, fused)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_position_sees_itself_and_what_is_before_it(positions: str, threads: int) -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(d_model=16, n_heads=2, context_length=40, positions=positions)
    attention = CausalSelfAttention(cfg)
    x = torch.randn(2, 40, 16)
    changed = x.clone()
    changed[:, 17] += 1
    before, after = attention(x), attention(changed)
    torch.testing.assert_close(after[:, :17], before[:, :17], rtol=0, atol=0)
    assert bool(((after - before).abs().amax((0, 2))[17:] > 1e-5).all())


def test_both_ways_through_the_module(fused_calls: list[int]) -> None:
    """The same module, with one thread and with two."""
    cfg = ModelConfig(d_model=16, n_heads=2, context_length=24)
    torch.manual_seed(0)
    attention, x = CausalSelfAttention(cfg), torch.randn(2, 24, 16)
    before = torch.get_num_threads()
    found = []
    for n in (1, 2):
        torch.set_num_threads(n)
        found.append(attention(x))
    torch.set_num_threads(before)
    assert fused_calls == [24]
    torch.testing.assert_close(*found)


def test_which_way_is_taken(threads: int, fused_calls: list[int]) -> None:
    """Whole matrices for short sequences on several threads, without dropout and outside autocast."""
    cfg = ModelConfig(d_model=16, n_heads=2, context_length=2 * SHORT, dropout_attention=0.1)
    attention = CausalSelfAttention(cfg)

    def fused(length: int, train: bool = False, autocast: bool = False) -> bool:
        fused_calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            attention.train(train)(torch.randn(1, length, 16))
        return bool(fused_calls)

    assert fused(SHORT) == (threads == 1)
    assert fused(SHORT + 1)
    assert fused(SHORT, train=True)  # dropout
    assert fused(SHORT, autocast=True)


def test_the_mask_is_no_part_of_a_checkpoint() -> None:
    assert set(CausalSelfAttention(ModelConfig(bias=False)).state_dict()) == {"qkv.weight", "out.weight"}
