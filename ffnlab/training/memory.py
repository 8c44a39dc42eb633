"""Whether a network can fit into this machine's memory, told from its configuration before anything is allocated."""

import os

from ffnlab.config import RunConfig
from ffnlab.data.config import CopyData
from ffnlab.errors import UserError
from ffnlab.training.engine import on_gpu

GIB = 1024**3
BYTES = {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8, 64: 8}  # of a number; 4 otherwise


def check_memory(cfg: RunConfig) -> None:
    """Refuse sizes that cannot be meant, by a lower bound on what they take.

    On the CPU a parameter takes four numbers (weight, gradient, AdamW's two averages), and a step keeps at least the
    residual stream of every layer. For a GPU the weights are made in the machine's memory first.

    Raises:
        UserError: with the number of parameters and the bytes.
    """
    have = machine_memory()
    parameters, activations = least_parameters(cfg), least_activations(cfg)
    on_cpu = not on_gpu(cfg.trainer)
    width = BYTES.get(cfg.trainer.get("precision", 32), 4)
    need = width * (4 * parameters + activations if on_cpu else parameters)
    if need <= have:
        return
    model, train = cfg.model, cfg.train
    sizes = (
        f"model.d_model={model.d_model}, model.n_layers={model.n_layers}, model.context_length={model.context_length}"
    )
    if cfg.budget.d_ff:
        sizes += f", budget.d_ff={cfg.budget.d_ff}"
    if 4 * parameters < activations:
        sizes += f", train.batch_size={train.batch_size}"
    raise UserError(
        f"{sizes} make at least {parameters:.3g} parameters and take at least {need / GIB:,.0f} GiB of memory "
        f"{'to train' if on_cpu else 'to begin with'}; this machine has {have / GIB:,.0f} GiB"
    )


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def least_parameters(cfg: RunConfig) -> int:
    """Attention's four projections, the block's (at least up and down), learned positions."""
    model = cfg.model
    ffn = 2 * model.d_model * cfg.budget.d_ff if cfg.budget.d_ff else 8 * model.d_model**2
    positions = model.context_length * model.d_model if model.positions == "learned" else 0
    return model.n_layers * (4 * model.d_model**2 + ffn) + positions


def least_activations(cfg: RunConfig) -> int:
    """Numbers that a step keeps for its way back: the input of every layer, for the sequences of one part."""
    data = cfg.data
    length = 2 * data.length + 1 if isinstance(data, CopyData) else cfg.model.context_length
    parts = cfg.trainer.get("accumulate_grad_batches", 1)
    sequences = cfg.train.batch_size // (parts if isinstance(parts, int) and parts > 0 else 1)
    return sequences * length * cfg.model.d_model * cfg.model.n_layers


def memory_message(error: BaseException) -> str | None:
    """One line for an allocation that failed, on the CPU or a GPU; None for other errors."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "DefaultCPUAllocator" in text:
        return (
            f"out of memory ({(text.splitlines() or [type(error).__name__])[0][:100]}): make the network smaller, or "
            "train.batch_size, or cut a step by trainer.accumulate_grad_batches=N"
        )
    return None
