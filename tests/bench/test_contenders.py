"""What is raced: the same work for everyone, and the products of a step counted rightly."""

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ffnlab.bench.contenders import make_loop
from ffnlab.bench.memory import measure_memory
from ffnlab.bench.products import Operand, Product, lay_out, product_runner, square_rate, step_flops, step_products
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


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_products_of_a_step(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products for each matrix: outputs, input gradients, weight gradients; 6 FLOPs a weight and token."""
    monkeypatch.setattr("ffnlab.model.attention.SHORT", 0)  # attention is one kernel
    loop = make_loop("bare", setting)
    cfg = loop.cfg
    products = step_products(loop)
    n_matrices = 4 * cfg.model.n_layers + 1  # qkv, out, up, down; the head
    assert len(products) == 3 * n_matrices
    d, tokens = cfg.model.d_model, cfg.train.batch_size * cfg.model.context_length
    weights = cfg.model.n_layers * 12 * d * d + loop.data.vocab_size * d
    flops = sum(product.flops for product in products)
    assert flops == 6 * weights * tokens
    assert step_flops(loop) >= flops
    assert all(p.grad is None for p in loop.network.parameters())


def test_products_of_attention(setting: Setting, two_threads: None) -> None:
    """Two for each layer forward, four backward, each ``2 B T^2 D``."""
    loop = make_loop("bare", setting)
    model, rows = loop.cfg.model, loop.cfg.train.batch_size
    batched = [product for product in step_products(loop) if len(product.left.shape) == 3]
    assert len(batched) == 6 * model.n_layers
    assert {product.flops for product in batched} == {2 * rows * model.context_length**2 * model.d_model}


def test_a_matrix_of_weights_is_one_operand_of_several_products(setting: Setting) -> None:
    """Of its outputs and of its input's gradient: a replay has to find it in the cache as the step did."""
    loop = make_loop("bare", setting)
    seen = Counter(operand.place for p in step_products(loop) for operand in (p.left, p.right))
    linears = [module for module in loop.network.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(seen[linear.weight.data_ptr()] >= 2 for linear in linears)


def test_operands_lie_as_they_lay() -> None:
    left = Operand(8, (2, 3), (1, 2), torch.float64)  # a transposed matrix
    right = Operand(16, (3, 4), (4, 1), torch.float64)
    out = Operand(24, (2, 4), (4, 1), torch.float64)
    again = Product(out, Operand(32, (4, 2), (2, 1), torch.float64), Operand(8, (2, 2), (2, 1), torch.float64))
    products = [Product(left, right, out), again]
    assert [product.flops for product in products] == [48, 32]
    (a, b, ab), (again_ab, _, over_a) = lay_out(products, "cpu")
    assert (a.stride(), b.stride()) == ((1, 2), (4, 1))
    assert again_ab.data_ptr() == ab.data_ptr()
    assert over_a.data_ptr() == a.data_ptr()
    expected = a @ b
    product_runner(products, "cpu")(1)  # on numbers of its own
    torch.matmul(a, b, out=ab)
    torch.testing.assert_close(again_ab, expected)


def test_square_rate_is_a_rate(setting: Setting) -> None:
    assert 1e6 < square_rate(setting, 64, repeats=2) < 1e15


def test_split_covers_a_step(setting: Setting) -> None:
    threads = torch.get_num_threads()
    split = split_step(setting, 3)
    torch.set_num_threads(threads)
    assert tuple(split.phases) == PHASES
    assert split.kinds["matrix products"] > 0
    assert split.kinds["fused attention"] > 0
    assert split.largest_other != "matrix products"


@pytest.mark.slow
def test_memory_grows_with_the_vocabulary(setting: Setting) -> None:
    small, large, *contexts = measure_memory(setting, [256, 8192], [16], tokens_per_step=2048)
    assert large.peak_mib > small.peak_mib + 30  # 2048 x 8192 logits alone are 64 MiB
    assert [point.checkpoint_blocks for point in contexts] == [False, True]
