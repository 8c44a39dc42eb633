"""What has to hold on an accelerator. Where there is none, the same is tried on the CPU."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ffnlab.config import compose
from ffnlab.ffn import make_block
from ffnlab.model import LanguageModel, ModelConfig, build
from ffnlab.training import train
from ffnlab.training.metrics import seed_generators
from ffnlab.training.optim import make_optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """TF32 would round the factors of float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def network(ffn: str = "silu") -> LanguageModel:
    cfg = ModelConfig(d_model=32, n_layers=2, n_heads=2, context_length=16)
    return build(cfg, 61, make_block("ffnlab.ffn.GatedFFN", {"activation": ffn}), 88, 0)


def batch(device: str = "cpu") -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: nn.Module, device: str, autocast: bool = False) -> tuple[float, Tensor]:
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model.loss(*batch(device))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])


def test_float32_agrees_with_the_cpu() -> None:
    on_cpu = network()
    on_device = copy.deepcopy(on_cpu).to(DEVICE)
    loss, gradient = loss_and_gradients(on_cpu, "cpu")
    found_loss, found = loss_and_gradients(on_device, DEVICE)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert float((found - gradient).norm() / gradient.norm()) < 1e-4


def test_bfloat16_is_near_float32() -> None:
    model = network().to(DEVICE)
    loss, gradient = loss_and_gradients(model, DEVICE)
    model.zero_grad()
    mixed_loss, mixed = loss_and_gradients(model, DEVICE, autocast=True)
    assert mixed_loss == pytest.approx(loss, rel=0.01)
    assert 0 < float((mixed - gradient).norm() / gradient.norm()) < 0.05


def test_compiled_step_agrees_with_the_eager_one() -> None:
    eager, compiled = network().to(DEVICE), network().to(DEVICE)
    compiled.compile(backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for model in (eager, compiled):
        optimizer = make_optimizer(model, compose([]).optim)
        for _ in range(2):
            loss_and_gradients(model, DEVICE)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss, found = float(eager.loss(*batch(DEVICE))), float(compiled.loss(*batch(DEVICE)))
    assert found == pytest.approx(loss, rel=1e-3)


def test_seeding_repeats_the_device_s_dropout() -> None:
    ones = torch.ones(1000, device=DEVICE)
    masks = []
    for seed in (3, 3, 4):
        seed_generators(seed)
        masks.append(nn.functional.dropout(ones, 0.5))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_run_from_end_to_end(tmp_path: Path, tiny: list[str]) -> None:
    accelerator = "gpu" if DEVICE == "cuda" else "cpu"
    cfg = compose([*tiny, "ffn=swiglu", f"trainer.accelerator={accelerator}", "logger=none"])
    result = train(cfg, tmp_path / "run", console=Console(quiet=True))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert 0 < result["val/loss"] < 10
    assert 0 <= result["dead/rel"] <= 1
    if DEVICE == "cuda":
        assert record["hardware"]["device"] == torch.cuda.get_device_name()
