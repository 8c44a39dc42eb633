"""The census while a network trains: before the first step, at every validation, and at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning
import numpy as np
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from ffnlab.census.figures import changes, relatively_dead, split_layers
from ffnlab.census.layers import block_down
from ffnlab.census.measure import Census, census
from ffnlab.census.picture import draw
from ffnlab.census.table import TableFile


class ValidationData(Protocol):
    """What a census reads: the first tokens of the validation set, in a fixed order."""

    def val_batches(self, batch_size: int, limit_tokens: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (inputs, targets), `(B, T)`; targets of -100 do not count."""


class CensusCallback(lightning.Callback):
    """Runs the census of `pl_module.whole_network()` and logs it to every logger.

    Every validation of `fit` (the sanity check before the first step included) counts the first `n`
    validation tokens; `trainer.validate`, which ends a run, counts the first `n_final`. The figures of the
    latter are not logged as points, because figures at different N do not belong on one curve: they are left in
    `final`, for the run's result. Then `census.png` and `census.parquet` are written.

    The processes that share batches out (`pl_module.share` says among how many) share the census too.
    Put it before callbacks that time training, so that they see its time as validation. Nothing runs in
    training steps. Raises `NonFiniteError` when an activation is not finite.
    """

    def __init__(
        self,
        data: ValidationData,
        run_dir: Path,
        n: int = 8192,
        n_final: int = 65536,
        batch_size: int = 8,
        gradient_batches: int = 4,
        title: str = "",
    ) -> None:
        self.data, self.run_dir, self.title = data, run_dir, title
        self.n, self.n_final = n, n_final
        self.batch_size, self.gradient_batches = batch_size, gradient_batches
        self.final: dict[str, float] = {}
        self._table = TableFile(run_dir)
        self._steps: list[int] = []
        self._rates: list[list[float]] = []
        self._counted = 0  # the N of the last census on the way
        self._dead: list[list[bool]] = []  # per layer, of the last census on the way
        self._exact_zero: list[bool] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped."""
        return {
            "steps": self._steps,
            "rates": self._rates,
            "counted": self._counted,
            "dead": self._dead,
            "exact_zero": self._exact_zero,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._steps = list(state_dict["steps"])
        self._rates = list(state_dict["rates"])
        self._counted = state_dict["counted"]
        self._dead = list(state_dict["dead"])
        self._exact_zero = state_dict["exact_zero"]

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Take the census that belongs to this validation."""
        if trainer.state.fn == "validate":
            self._finish(trainer, pl_module)
        elif not trainer.sanity_checking or trainer.global_step == 0:
            self._on_the_way(trainer, pl_module)

    def _on_the_way(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        if step in self._steps:
            return
        result = self._take(trainer, pl_module, self.n)
        figures = result.figures() | result.health
        dead = [relatively_dead(layer["max_abs"], layer["mean_square"]) for layer in split_layers(result.table)]
        figures |= self._changes(dead)
        self._steps.append(step)
        self._rates.append([float(layer.mean()) for layer in dead])
        self._dead = [layer.tolist() for layer in dead]
        self._counted = result.n
        if trainer.is_global_zero:
            self._table.add(result.table, step, final=False)
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def _finish(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        if self._steps and self._steps[-1] != step:
            self._on_the_way(trainer, pl_module)  # so that the curves and the picture reach the end
        result = self._take(trainer, pl_module, self.n_final)
        self.final = result.figures() | result.health
        if not trainer.is_global_zero:
            return
        self._table.add(result.table, step, final=True)
        self._table.close(self._steps, step)
        picture = self.run_dir / "census.png"
        if self._steps:
            draw(self._steps, self._rates, self._counted, picture, self.title)
        else:
            layers = split_layers(result.table)
            dead = [relatively_dead(layer["max_abs"], layer["mean_square"]) for layer in layers]
            draw([step], [[float(layer.mean()) for layer in dead]], result.n, picture, self.title)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("dead/rel_picture", [str(picture)], step=step)

    def _changes(self, dead: list[np.ndarray]) -> dict[str, float]:
        if not self._dead:
            return {}
        return changes([np.array(layer) for layer in self._dead], dead)

    def _take(self, trainer: lightning.Trainer, pl_module: Any, n: int) -> Census:
        result = count_network(
            pl_module.whole_network(),
            FirstTokens(self.data, self.batch_size, n),
            n,
            updated=trainer.global_step > 0,
            gradient_batches=self.gradient_batches,
            exact_zero=self._exact_zero,
            shared=pl_module.share[0] > 1,
        )
        if self._exact_zero is None:
            self._exact_zero = [bool(layer["exact_zero"][0]) for layer in split_layers(result.table)]
        return result


def count_network(
    network: Any,
    tokens: FirstTokens,
    n: int,
    updated: bool,
    gradient_batches: int = 4,
    exact_zero: Sequence[bool] | None = None,
    shared: bool = False,
) -> Census:
    """Take the census of this project's `LanguageModel`.

    Without an update yet (`updated=False`) gradient death is left out: a zero-initialised `down` passes no gradient
    on, and that is no death. Other arguments and errors as for `census`; `UserError` for a block without `down`.
    """
    for block in network.blocks:
        block_down(block.ffn)
    return census(
        network,
        tokens,
        down=["blocks.*.ffn.down"],
        n=n,
        blocks=["blocks.*"],
        loss=(lambda batch: network.loss(*batch)) if updated else None,
        gradient_batches=gradient_batches,
        forward=network.features,  # the head is not looked at
        exact_zero=exact_zero,
        shared=shared,
    )


class FirstTokens:
    """The first validation tokens as batches that can be gone through twice without being held."""

    def __init__(self, data: ValidationData, batch_size: int, n: int) -> None:
        self.data, self.batch_size, self.n = data, batch_size, n

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Start from the first token."""
        return iter(self.data.val_batches(self.batch_size, max(self.n, 1)))
