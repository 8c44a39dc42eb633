"""More than one process: who sees which data, and how a network is cut up.

``trainer=ddp`` copies the network and shares out the batch. ``trainer=model_parallel`` cuts every FFN over the
processes, ``up`` and ``gate`` by output features and ``down`` by input features (Megatron-LM, Shoeybi et al. 2019,
arXiv 1909.08053), so that each holds a share of the neurons and one sum per block puts the outputs together; all see
the same batch. ``trainer=fsdp`` shares out the batch and the storage of every block's weights (PyTorch's fully_shard).
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ffnlab.errors import UserError

Network = TypeVar("Network", bound=nn.Module)

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


def process_rank() -> int:
    """The number of this process among those of the run, before anything is connected."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


def make_strategy(name: Any, n_processes: int) -> Any:
    """The strategies that Lightning does not know by name; others are handed through."""
    if name == "model_parallel":
        return ModelParallelStrategy(1, n_processes, save_distributed_checkpoint=False)
    if name == "fsdp":
        return ModelParallelStrategy(n_processes, 1, save_distributed_checkpoint=False)
    return name


def data_share(arguments: dict[str, Any], trainer: lightning.Trainer) -> tuple[int, int]:
    """Into how many shares the batch is cut, and which of them is this process's."""
    if arguments.get("strategy") == "model_parallel":
        return 1, 0
    return trainer.world_size, trainer.global_rank


@contextmanager
def lent_environment() -> Iterator[None]:
    """Take back what Lightning's launcher leaves in the environment, so that the next run can launch processes too."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    connected = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not connected and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def shard(network: Any, mesh: Any) -> None:
    """Cut the network as the device mesh says: FFNs over ``tensor_parallel``, storage over ``data_parallel``."""
    from torch.distributed.fsdp import fully_shard

    over_tensors, over_data = mesh["tensor_parallel"], mesh["data_parallel"]
    if over_tensors.size() > 1:
        for block in network.blocks:
            _cut_ffn(block.ffn, over_tensors)
    if over_data.size() > 1 or over_tensors.size() == 1:
        for block in network.blocks:
            fully_shard(block, mesh=over_data)
        fully_shard(network, mesh=over_data)


def check_cut(ffn: Any, parts: int) -> None:
    """Refuse a block that ``_cut_ffn`` could not cut into ``parts``.

    Raises:
        UserError: it lacks ``up`` or ``down``, has other parameters, drops neurons, or has an uneven ``d_ff``.
    """
    name, down = type(ffn).__name__, getattr(ffn, "down", None)
    if not _incoming(ffn) or not isinstance(down, nn.Linear):
        raise UserError(f"trainer=model_parallel cuts blocks with up (and gate) and down, which {name} has not")
    others = [p for p, _ in ffn.named_parameters() if p.partition(".")[0] not in (*_incoming(ffn), "down")]
    if others:
        raise UserError(f"trainer=model_parallel cannot cut {name}: {others[0]} belongs to no projection")
    if down.in_features % parts:
        raise UserError(
            f"trainer=model_parallel cannot cut d_ff={down.in_features} into {parts} equal parts; "
            f"set budget.multiple_of to a multiple of {parts}"
        )
    hidden = getattr(ffn, "drop_hidden", None)
    if isinstance(hidden, nn.Dropout) and hidden.p > 0:
        raise UserError("trainer=model_parallel needs ffn.dropout_hidden=0: each part would drop the same neurons")


def _incoming(ffn: nn.Module) -> list[str]:
    return [name for name in ("gate", "up") if isinstance(getattr(ffn, name, None), nn.Linear)]


def _cut_ffn(ffn: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {name: ColwiseParallel() for name in _incoming(ffn)}
    parallelize_module(ffn, mesh, plan | {"down": RowwiseParallel()})


def is_sharded(network: nn.Module) -> bool:
    """Whether any parameter is spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece; every process has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_plain(plain: nn.Module, network: nn.Module) -> None:
    """Copy a sharded network's weights into one of the same shape that is in one piece."""
    for target, source in zip(plain.parameters(), network.parameters(), strict=True):
        target.copy_(whole(source))


def plain_copy(network: Network) -> Network:
    """A copy on the CPU, made before the network is cut up."""
    return copy.deepcopy(network).cpu()


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The common L2 norm of all gradients; sharded and whole ones may be mixed."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(g)) for g in gradients]))


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale gradients of common norm ``norm`` down to ``limit``, where they are above it."""
    plain = [parameter for parameter in parameters if not isinstance(parameter.grad, DTensor)]
    torch.nn.utils.clip_grads_with_norm_(plain, limit, norm)
    if len(plain) == len(parameters):
        return
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            parameter.grad.to_local().mul_(factor)
