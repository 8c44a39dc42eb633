"""Recomputing blocks in the backward pass changes memory, not numbers: dropout draws the same masks again."""

import torch
from torch import Tensor

from ffnlab.ffn import make_block
from ffnlab.model import LanguageModel, ModelConfig, build

OPTIONS = {"activation": "silu", "dropout_hidden": 0.3, "dropout_output": 0.2}


def network() -> LanguageModel:
    cfg = ModelConfig(
        d_model=16, n_layers=3, n_heads=2, context_length=12, dropout_attention=0.25, dropout_embedding=0.1
    )
    return build(cfg, 31, make_block("ffnlab.ffn.GatedFFN", OPTIONS), 24, 0)


def gradients(model: LanguageModel, recompute: bool, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    model.checkpoint_blocks = recompute
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(31, (4, 13), generator=generator)
    torch.manual_seed(seed)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_equal_gradients_with_dropout() -> None:
    model = network()
    plain_loss, plain = gradients(model, recompute=False, seed=5)
    loss, found = gradients(model, recompute=True, seed=5)
    assert torch.equal(loss, plain_loss)
    assert found.keys() == plain.keys()
    for name in plain:
        assert torch.equal(found[name], plain[name]), name


def test_dropout_was_on() -> None:
    """Another seed draws other masks, so the test above could have failed."""
    model = network()
    _, first = gradients(model, recompute=True, seed=5)
    _, second = gradients(model, recompute=True, seed=6)
    assert not torch.equal(first["token_embedding.weight"], second["token_embedding.weight"])


def test_blocks_are_recomputed() -> None:
    model = network()
    seen = []
    model.blocks[0].attention_norm.register_forward_hook(lambda *_: seen.append(1))
    gradients(model, recompute=True, seed=0)
    assert len(seen) == 2
    model.eval()
    model.loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    assert len(seen) == 3
