"""The batches a census accepts: tensors, pairs and mappings, and which of their positions count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ffnlab.errors import UserError

IGNORED = -100  # the target that takes a position out of loss and census


def count(batches: Iterable[Any], limit: int | None) -> tuple[int, int]:
    """Counting positions in the batches, at most `limit`, and the number of batches that hold them."""
    if limit is not None and limit < 1:
        raise UserError(f"the census needs at least 1 token, not {limit}")
    total = n_batches = 0
    for n_batches, batch in enumerate(batches, start=1):
        inputs, mask = unpack(batch)
        total += int(mask.sum()) if mask is not None else positions(inputs)
        if limit is not None and total >= limit:
            return limit, n_batches
    if not total:
        raise UserError("there are no tokens to count: every position is padding or ignored")
    return total, n_batches


def unpack(batch: Any) -> tuple[Any, Tensor | None]:
    """What the model is called with, and which positions count (None: all)."""
    if isinstance(batch, Mapping):
        mask = batch["attention_mask"] != 0 if "attention_mask" in batch else None
        if "labels" in batch:
            labelled = batch["labels"] != IGNORED
            mask = labelled if mask is None else mask & labelled
        return batch, mask
    if isinstance(batch, tuple | list):
        inputs, second = batch
        mask = second if second.dtype == torch.bool else second != IGNORED
        if mask.numel() != positions(inputs):
            raise UserError(
                f"targets or mask of shape {tuple(mask.shape)} do not fit inputs of shape {tuple(inputs.shape)}"
            )
        return inputs, mask
    return batch, None


def positions(inputs: Any) -> int:
    """Number of tokens: all entries of integer inputs, all vectors of floating-point ones."""
    if isinstance(inputs, Mapping):
        inputs = inputs["input_ids"] if "input_ids" in inputs else next(iter(inputs.values()))
    return inputs.numel() // inputs.shape[-1] if inputs.is_floating_point() else inputs.numel()


def call(forward: Callable[..., Any], inputs: Any) -> None:
    """Run the model on what `unpack` returned."""
    if isinstance(inputs, Mapping):
        forward(**inputs)
    else:
        forward(inputs)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch."""
    if isinstance(batch, Mapping):
        return {name: value.to(device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(item.to(device) for item in batch)
    return batch.to(device)


def first_row(batch: Any) -> Any:
    """Copy the first sequence of a batch. A copy, so that no gradient meets a tensor made in inference mode."""
    if isinstance(batch, Mapping):
        return {name: value[:1].clone() for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(item[:1].clone() for item in batch)
    return batch[:1].clone()


def spread(total: int, picks: int) -> set[int]:
    """At most `picks` indices, evenly spaced over `total`."""
    return {index * total // picks for index in range(picks)}
