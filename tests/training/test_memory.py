"""Networks that no memory holds are refused from their sizes, before anything is allocated."""

import pytest

from ffnlab.config import compose
from ffnlab.errors import UserError
from ffnlab.training import memory, prepare_run
from ffnlab.training.memory import least_activations, least_parameters, memory_message

TINY = ["data=copy", "trainer=cpu", "logger=none"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (["model.d_model=1000000008", "model.n_heads=1"], "model.d_model=1000000008"),
        (["model.n_layers=10000000"], "at least 1.11e+12 parameters"),
        (["model.context_length=1e12"], "model.context_length=1000000000000"),
        (["budget=none", "budget.d_ff=1e13"], "budget.d_ff=10000000000000"),
        (["train.batch_size=1e10", "train.tokens=1e15"], "train.batch_size=10000000000"),
    ],
)
def test_absurd_sizes(sizes: list[str], words: str) -> None:
    cfg = compose([*TINY, *sizes])
    with pytest.raises(UserError) as refusal:
        prepare_run(cfg)
    assert words in str(refusal.value)
    assert "GiB" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ffn", ["relu", "swiglu"])
@pytest.mark.parametrize("budget", [["budget=params"], ["budget=none", "budget.d_ff=7"]])
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_the_bound_is_one_and_a_close_one(ffn: str, budget: list[str], positions: str) -> None:
    cfg = compose([*TINY, f"ffn={ffn}", *budget, f"model.positions={positions}", "model.d_model=96"])
    true = sum(parameter.numel() for parameter in prepare_run(cfg).network.parameters())
    assert 0.9 * true < least_parameters(cfg) <= true * 1.005  # the budget rounds d_ff


def test_a_step_in_parts_keeps_less() -> None:
    whole, cut = compose(TINY), compose([*TINY, "trainer.accumulate_grad_batches=2"])
    assert least_activations(whole) == 2 * least_activations(cut) == 8 * 17 * 96 * 4


def test_a_machine_with_room_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose([*TINY, "model.d_model=1008", "model.n_layers=100"])  # 1.2 G parameters, 18 GiB to train
    monkeypatch.setattr(memory, "machine_memory", lambda: 32 * memory.GIB)
    memory.check_memory(cfg)
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * memory.GIB)
    with pytest.raises(UserError, match="this machine has 16 GiB"):
        prepare_run(cfg)
    cfg.trainer["precision"] = "bf16-true"  # half of it
    memory.check_memory(cfg)


def test_an_allocation_that_fails_is_said_in_a_line() -> None:
    cuda = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert str(memory_message(cuda)).startswith("out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)")
    assert memory_message(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert memory_message(MemoryError())
    assert memory_message(RuntimeError("shapes do not fit")) is None
