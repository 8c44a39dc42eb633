"""What is raced: the same work for everyone, and the products of a step counted rightly."""

import math

import pytest
import torch

from ffnlab.bench.contenders import make_loop
from ffnlab.bench.memory import measure_memory
from ffnlab.bench.products import product_runner, square_rate, step_flops, step_products
from ffnlab.bench.setting import SHAPES, Setting
from ffnlab.bench.split import PHASES, split_step


@pytest.fixture
def setting(tiny: list[str]) -> Setting:
    return Setting("tiny", threads=1, overrides=tiny)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_composes(shape: str) -> None:
    cfg = Setting(shape).config()
    assert cfg.ffn.name == "gelu"
    assert cfg.logger.kind == "none"


@pytest.mark.parametrize("name", ["bare", "gpt2", "gpt2-gelu", "x-transformers"])
def test_contenders_have_one_size_and_learn(name: str, setting: Setting) -> None:
    loop = make_loop(name, setting)
    ours = make_loop("bare", setting)
    sizes = [sum(p.numel() for p in each.network.parameters()) for each in (loop, ours)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)  # biases and norms of the others
    batch = loop.batch()
    before = float(loop.forward(*batch))
    assert before == pytest.approx(math.log(loop.data.vocab_size), rel=0.2) or name == "x-transformers"
    loop.run(20)
    assert float(loop.forward(*batch)) < before


def test_products_of_a_step(setting: Setting) -> None:
    """Three products for each matrix: outputs, input gradients, weight gradients; 6 FLOPs a weight and token."""
    loop = make_loop("bare", setting)
    cfg = loop.cfg
    products = step_products(loop)
    n_matrices = 4 * cfg.model.n_layers + 1  # qkv, out, up, down; the head
    assert sum(products.values()) == 3 * n_matrices
    d, tokens = cfg.model.d_model, cfg.train.batch_size * cfg.model.context_length
    weights = cfg.model.n_layers * 12 * d * d + loop.data.vocab_size * d
    flops = sum(product.flops * count for product, count in products.items())
    assert flops == 6 * weights * tokens
    assert step_flops(loop) >= flops
    assert all(p.grad is None for p in loop.network.parameters())
    product_runner(products, "cpu")(2)


def test_square_rate_is_a_rate(setting: Setting) -> None:
    assert 1e6 < square_rate(setting, 64, repeats=2) < 1e15


def test_split_covers_a_step(setting: Setting) -> None:
    threads = torch.get_num_threads()
    split = split_step(setting, 3)
    torch.set_num_threads(threads)
    assert tuple(split.phases) == PHASES
    assert split.kinds["matrix products"] > 0
    assert split.kinds["attention"] > 0
    assert split.largest_other != "matrix products"


@pytest.mark.slow
def test_memory_grows_with_the_vocabulary(setting: Setting) -> None:
    small, large, *contexts = measure_memory(setting, [256, 8192], [16], tokens_per_step=2048)
    assert large.peak_mib > small.peak_mib + 30  # 2048 x 8192 logits alone are 64 MiB
    assert [point.checkpoint_blocks for point in contexts] == [False, True]
