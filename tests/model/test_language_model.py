"""The network around the block: causality, start, positions, generation."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN
from ffnlab.model import IGNORE, LanguageModel, ModelConfig, build

SIZES: dict[str, Any] = {"d_model": 32, "n_layers": 2, "n_heads": 4, "context_length": 16}
PLACEMENTS = pytest.mark.parametrize("norm_placement", ["pre", "post"])
POSITIONS = pytest.mark.parametrize("positions", ["learned", "rope", "none"])


def make(vocab_size: int = 50, **choices: Any) -> LanguageModel:
    return build(ModelConfig(**(SIZES | choices)), vocab_size, partial(GatedFFN, activation="silu"), 88, init_seed=0)


@PLACEMENTS
@POSITIONS
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_token_changes_no_earlier_logits(norm_placement: str, positions: str, norm: str) -> None:
    model = make(norm_placement=norm_placement, positions=positions, norm=norm).double().eval()
    tokens = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    for position in range(16):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        after = model(changed)
        assert torch.equal(before[0, :position], after[0, :position])
        assert not torch.allclose(before[0, position], after[0, position])


@PLACEMENTS
@POSITIONS
@pytest.mark.parametrize("tied_head", [True, False])
def test_the_first_loss_is_that_of_guessing(norm_placement: str, positions: str, tied_head: bool) -> None:
    model = make(1000, norm_placement=norm_placement, positions=positions, tied_head=tied_head)
    tokens = torch.randint(0, 1000, (8, 17), generator=torch.Generator().manual_seed(0))
    assert model.loss(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(1000), abs=0.05)


def test_rope_sees_distance_only() -> None:
    # Shifting a sequence by what comes before it changes nothing but what the earlier tokens add to attention;
    # the rotation itself is tested by moving queries and keys together.
    from ffnlab.model.attention import Rope

    rope = Rope(8, 64)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)

    def score(at_q: int, at_k: int) -> float:
        q_line, k_line = torch.zeros(1, 1, 64, 8).double(), torch.zeros(1, 1, 64, 8).double()
        q_line[..., at_q, :], k_line[..., at_k, :] = q, k
        return float((rope(q_line)[..., at_q, :] * rope(k_line)[..., at_k, :]).sum())

    assert score(5, 2) == pytest.approx(score(45, 42), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_targets_of_minus_100_do_not_count() -> None:
    model = make()
    tokens = torch.randint(0, 50, (2, 16))
    targets = tokens.roll(-1, 1)
    targets[1] = IGNORE
    assert torch.allclose(model.loss(tokens, targets), model.loss(tokens[:1], targets[:1]))
    assert torch.allclose(model.loss(tokens, targets, "sum"), 16 * model.loss(tokens[:1], targets[:1]))


def test_a_tied_head_is_one_parameter() -> None:
    tied, untied = make(tied_head=True), make(tied_head=False)
    assert tied.head.weight is tied.token_embedding.weight
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(untied) - count(tied) == 50 * 32


def test_the_size_of_attention_beside_the_ffn() -> None:
    # At width 768 attention has about 2.4 M parameters and the dense FFN of 3072 about 4.7 M.
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(d_model=768, n_heads=12, n_layers=1), 10, lambda: DenseFFN(768, 3072))
    attention = sum(p.numel() for p in model.blocks[0].attention.parameters())
    assert attention == 4 * 768 * 768 == 2_359_296


def test_presets_have_the_documented_shapes() -> None:
    from ffnlab.config import compose

    shapes = {}
    for name in ("tiny", "small", "base"):
        m = compose([f"model={name}"]).model
        shapes[name] = (m.d_model, m.n_layers, m.n_heads, m.context_length)
    assert shapes == {"tiny": (96, 4, 3, 128), "small": (384, 6, 6, 256), "base": (768, 12, 12, 1024)}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"n_heads": 5}, "n_heads=5 does not divide model.d_model=32; 4 would"),
        ({"n_heads": 32, "positions": "rope"}, "must be even, not 1"),
    ],
)
def test_sizes_that_do_not_go_together(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**choices)


def test_greedy_generation_follows_the_largest_logit_beyond_the_context() -> None:
    model = make().eval()
    prompt = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(1))
    text = model.generate(prompt, 12, temperature=0)
    assert text.shape == (2, 22)
    assert torch.equal(text[:, :10], prompt)
    for end in range(10, 22):
        assert torch.equal(text[:, end], model(text[:, max(0, end - 16) : end])[:, -1].argmax(-1))


def test_sampling_is_a_function_of_its_generator_and_top_k_bounds_it() -> None:
    model = make().eval()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    sample = lambda seed, k: model.generate(prompt, 20, 1.0, k, torch.Generator().manual_seed(seed))
    assert torch.equal(sample(0, None), sample(0, None))
    assert not torch.equal(sample(0, None), sample(1, None))
    assert torch.equal(sample(0, 1), model.generate(prompt, 20, temperature=0))
