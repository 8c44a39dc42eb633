"""Two processes that share the tokens must report what one process reports."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ffnlab.census import Census, NonFiniteError, census
from ffnlab.ffn import GatedFFN


def model() -> nn.Sequential:
    torch.manual_seed(0)
    ffn = GatedFFN(16, 40, "relu", bias=True)
    with torch.no_grad():
        ffn.gate.bias[:5] = -9
        ffn.gate.bias[5:30] = -1.5
    return nn.Sequential(nn.Embedding(64, 16), ffn)


def tokens() -> list[tuple[Tensor, Tensor]]:
    """An odd number of batches of unequal size, with positions that do not count."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for rows in (8, 3, 8, 8, 5):
        inputs = torch.randint(64, (rows, 16), generator=generator)
        targets = torch.randint(64, (rows, 16), generator=generator)
        targets[:, 11:] = -100
        batches.append((inputs, targets))
    return batches


def take(network: nn.Sequential, batches: list[tuple[Tensor, Tensor]], shared: bool) -> Census:
    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return network(batch[0]).square().mean()

    return census(network, batches, down=["down"], n=321, blocks=["1"], loss=loss, shared=shared)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        result = take(model(), tokens(), shared=True)
        # an infinity that only the second process meets must stop both, not leave one waiting
        poisoned = model()
        poisoned[1].act = Overflow()
        with pytest.raises(NonFiniteError, match="hidden"):
            take(poisoned, tokens(), shared=True)
        few = take(model(), tokens()[:1], shared=True)  # the second process has nothing to do
        torch.save((result, few), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


class Overflow(nn.Module):
    """Infinite for the batch of three rows, which is the second process's first."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0 if x.ndim == 3 and x.shape[0] == 3 else x


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    command = [sys.executable, __file__]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in (0, 1)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    alone = take(model(), tokens(), shared=False), take(model(), tokens()[:1], shared=False)
    for rank in (0, 1):
        together = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for one, two in zip(alone, together, strict=True):
            assert two.figures() == one.figures()
            assert two.health == pytest.approx(one.health, rel=1e-12)
    figures = alone[0].figures()
    assert alone[0].n == 321
    assert figures["dead/exact"] >= 5 / 40  # there is something to find
    assert figures["dead/rel_n16"] > figures["dead/rel"]


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
