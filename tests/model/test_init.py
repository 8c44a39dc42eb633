"""Initialisation by name: blocks that are compared start from the same weights everywhere else."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from ffnlab.budget import solve
from ffnlab.config import compose
from ffnlab.ffn import DenseFFN, make_block
from ffnlab.model import LanguageModel, ModelConfig, build, initialise, shared_init_hash
from ffnlab.training import train

CHOICES = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "conf" / "ffn").glob("*.yaml"))
CFG = ModelConfig(d_model=24, n_layers=2, n_heads=2, context_length=8, bias=True)


def network(choice: str, init_seed: int = 0, down_init: str = "scaled") -> LanguageModel:
    ffn = compose([f"ffn={choice}"]).ffn
    factory = make_block(ffn.target, ffn.options)
    return build(CFG, 40, factory, solve(factory, CFG.d_model).d_ff, init_seed, down_init)


@pytest.fixture(scope="module")
def networks() -> dict[str, LanguageModel]:
    return {choice: network(choice) for choice in CHOICES}


def test_there_are_the_twelve_choices() -> None:
    dense = {"relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "swish", "relu2"}
    gated = {"glu", "bilinear", "reglu", "geglu", "swiglu"}
    assert set(CHOICES) == dense | gated


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(CHOICES, 2)))
def test_every_pair_of_blocks_shares_all_other_weights(
    networks: dict[str, LanguageModel], one: str, other: str
) -> None:
    a, b = dict(networks[one].named_parameters()), dict(networks[other].named_parameters())
    shared = [name for name in a if ".ffn." not in name]
    assert shared == [name for name in b if ".ffn." not in name]
    assert len(shared) >= 2 * 8 + 4
    for name in shared:
        assert torch.equal(a[name], b[name]), name
    assert shared_init_hash(networks[one]) == shared_init_hash(networks[other])


def test_another_seed_gives_other_weights() -> None:
    assert shared_init_hash(network("gelu", 0)) != shared_init_hash(network("gelu", 1))


def test_names_decide_not_the_order_or_the_global_stream() -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first = network("swiglu")
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1000)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), network("swiglu").parameters(), strict=True))
    # No two matrices of a shape are alike: each name has a stream of its own.
    matrices = [p for n, p in first.named_parameters() if n.endswith("qkv.weight")]
    assert not torch.equal(matrices[0], matrices[1])


def test_the_table_of_starts() -> None:
    wide = ModelConfig(d_model=128, n_layers=8, n_heads=4, context_length=64, bias=True, tied_head=False)
    model = build(wide, 512, lambda d, f: DenseFFN(d, f, bias=True), 512, 0)
    scaled = 0.02 / math.sqrt(16)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.all(p == 1), name
        elif name.endswith("bias"):
            assert torch.all(p == 0), name
        else:
            small = name.endswith(("attention.out.weight", "ffn.down.weight"))
            assert p.std().item() == pytest.approx(scaled if small else 0.02, rel=0.05), name


@pytest.mark.parametrize(("down_init", "std"), [("normal", 0.02), ("scaled", 0.01), ("zero", 0.0)])
def test_the_down_projection_starts_as_configured(down_init: str, std: float) -> None:
    model = build(ModelConfig(d_model=64, n_layers=2, n_heads=2), 64, DenseFFN, 256, 0, down_init)
    for block in model.blocks:
        assert block.ffn.down.weight.std().item() == pytest.approx(std, rel=0.05, abs=1e-12)


@pytest.mark.parametrize("down_init", ["normal", "scaled", "zero"])
def test_the_table_of_starts_after_glorot(down_init: str) -> None:
    """Nothing adds up over depth in Post-LN, so nothing is divided by it."""
    wide = ModelConfig(d_model=128, n_layers=8, n_heads=4, context_length=64, tied_head=False, norm_placement="post")
    model = build(wide, 512, DenseFFN, 512, 0, down_init)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            continue
        std = math.sqrt(2 / sum(p.shape)) if name.startswith("blocks.") else 0.02
        if name.endswith("ffn.down.weight") and down_init == "zero":
            std = 0.0
        assert p.std().item() == pytest.approx(std, rel=0.05, abs=1e-12), name


@pytest.mark.parametrize(
    ("placement", "init", "scheme"),
    [("pre", "auto", "gpt2"), ("post", "auto", "xavier"), ("pre", "xavier", "xavier"), ("post", "gpt2", "gpt2")],
)
def test_which_start_is_taken(placement: str, init: str, scheme: str) -> None:
    cfg = compose([f"model.norm_placement={placement}", f"model.init={init}"]).model
    assert cfg.init_scheme == scheme
    model = build(cfg, 32, DenseFFN, 8, 0)
    std = 0.02 if scheme == "gpt2" else math.sqrt(2 / (3 * 96 + 96))
    assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.slow
def test_post_ln_learns_more_than_how_often_a_token_occurs(tmp_path: Path) -> None:
    """From GPT-2's weights it stays at the loss of a unigram model for as long as a short run lasts."""
    words = ["ffn=gelu", "model.norm_placement=post", "logger=none", "train.tokens=204_800", "optim.warmup=100"]
    losses = {}
    for init in ("auto", "gpt2"):
        cfg = compose([*words, f"model.init={init}", "train.val_every=200", "census.final_tokens=1024"])
        losses[init] = train(cfg, tmp_path / init, console=Console(quiet=True))["val/loss"]
    unigram = json.loads((tmp_path / "auto" / "run.json").read_text())["unigram_loss"]
    assert losses["auto"] < unigram - 0.3
    assert losses["gpt2"] > unigram - 0.1


class OddBlock(nn.Module):
    """A user's block with a gain and a norm: vectors keep what their module gave them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.gain = nn.Parameter(torch.full((d_ff,), 3.0))
        self.noise = nn.Parameter(torch.randn(d_ff))
        self.down = nn.Linear(d_ff, d_model)


def test_vectors_of_a_users_block_keep_their_start() -> None:
    a, b = (build(CFG, 40, OddBlock, 32, init_seed=5).blocks[0].ffn for _ in range(2))
    assert torch.all(a.gain == 3)
    assert torch.all(a.norm.weight == 1)
    assert torch.equal(a.noise, b.noise)  # what a constructor draws is a function of init_seed too


def test_initialise_can_be_repeated() -> None:
    model = network("geglu")
    start = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.add_(1)
    initialise(model, 0)
    assert all(torch.equal(p, q) for p, q in zip(start, model.parameters(), strict=True))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_parts_of_a_parametrisation_stay_as_its_module_made_them(norm) -> None:
    def factory(d_model: int, d_ff: int) -> nn.Module:
        block = DenseFFN(d_model, d_ff)
        block.up = norm(block.up)
        return block

    one, again, other = (build(CFG, 40, factory, 96, seed).blocks[0].ffn.up.weight for seed in (0, 0, 1))
    # nn.Linear's own start is uniform within 1/sqrt(fan_in).
    assert float(one.detach().std()) == pytest.approx(CFG.d_model**-0.5 / math.sqrt(3), rel=0.05)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
