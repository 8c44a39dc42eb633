"""The LightningModule: one loss, one optimiser, one validation figure."""

import math
from typing import Any

import lightning
import torch
from torch import Tensor

from ffnlab.config import OptimConfig
from ffnlab.model import IGNORE, LanguageModel
from ffnlab.training.batches import Batch
from ffnlab.training.guard import Diverged, first_nonfinite
from ffnlab.training.optim import make_optimizer, make_schedule


class LMModule(lightning.LightningModule):
    """Trains ``network`` on (inputs, targets) batches.

    After each training step ``last_loss`` and ``grad_norm`` hold device tensors that callbacks may read; after each
    validation ``val_metrics`` holds its figures.
    """

    def __init__(
        self, network: LanguageModel, optim: OptimConfig, n_steps: int, bytes_per_token: float | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.optim = optim
        self.n_steps = n_steps
        self.bytes_per_token = bytes_per_token
        self.last_loss: Tensor = torch.tensor(0.0)
        self.grad_norm: Tensor = torch.tensor(0.0)
        self.val_metrics: dict[str, float] = {}
        self._val_sums: Tensor = torch.zeros(2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss in nats per token of one part of a step."""
        self._batch = batch
        loss = self.network.loss(*batch)
        self.last_loss = loss.detach()
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Measure the gradient's norm, clip it where asked to, and refuse an update that is not finite.

        Raises:
            Diverged: before the optimiser has touched a weight.
        """
        limit = self.optim.grad_clip or math.inf
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        if not bool(torch.isfinite(self.grad_norm + self.last_loss)):
            lr = float(optimizer.param_groups[0]["lr"])
            raise Diverged(self.trainer.global_step + 1, first_nonfinite(self.network, self._batch), lr)

    def configure_optimizers(self) -> Any:
        """AdamW and the schedule, stepped once per optimiser step."""
        optimizer = make_optimizer(self.network, self.optim)
        schedule = make_schedule(optimizer, self.n_steps, self.optim)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self._val_sums = torch.zeros(2, dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch's loss and token count."""
        inputs_BT, targets_BT = batch
        loss = self.network.loss(inputs_BT, targets_BT, reduction="sum")
        self._val_sums += torch.stack((loss.double(), (targets_BT != IGNORE).sum().double()))

    def on_validation_epoch_end(self) -> None:
        """Token-weighted mean over all processes."""
        sums = self._val_sums
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        total, count = (float(value) for value in sums.tolist())
        loss = total / max(count, 1.0)
        self.val_metrics = {
            "val/loss": loss,
            "val/perplexity": math.exp(loss) if loss < 700 else math.inf,
            "val/tokens": count,
        }
        if self.bytes_per_token is not None:
            self.val_metrics["val/bpb"] = loss / math.log(2) / self.bytes_per_token
