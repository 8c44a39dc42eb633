"""The LightningModule: one loss, one optimiser, one validation figure."""

import math
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ffnlab.config import OptimConfig
from ffnlab.model import IGNORE, LanguageModel
from ffnlab.training.batches import Batch
from ffnlab.training.guard import Diverged, first_nonfinite
from ffnlab.training.optim import make_optimizer, make_schedule
from ffnlab.training.parallel import clip_gradients, fill_plain, gradient_norm, plain_copy, shard


class LMModule(lightning.LightningModule):
    """Trains ``network`` on (inputs, targets) batches.

    After each optimiser step ``step_losses`` (one for each part that the batch was cut into) and ``grad_norm`` hold its
    figures, after each validation ``val_metrics``.
    """

    def __init__(
        self, network: LanguageModel, optim: OptimConfig, n_steps: int, bytes_per_token: float | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.optim = optim
        self.n_steps = n_steps
        self.bytes_per_token = bytes_per_token
        self.step_losses: list[float] = []
        self.grad_norm = 0.0
        self.val_metrics: dict[str, float] = {}
        self.share = (1, 0)  # into how many shares a batch is cut over processes, and which one is ours
        self._val_sums: Tensor = torch.zeros(2)
        self._parts: list[tuple[Batch, Tensor]] = []  # of the step that is being computed, with their losses
        self._plain: tuple[LanguageModel, ...] = ()  # in a tuple, it is no part of this module

    def configure_model(self) -> None:
        """Cut the network over the processes, where the strategy has a device mesh."""
        if self.device_mesh is not None and not self._plain:
            self._plain = (plain_copy(self.network),)
            shard(self.network, self.device_mesh)

    def whole_network(self) -> Any:
        """The network in one piece: itself, or under a cut a copy with its weights, which every process asks for."""
        if not self._plain:
            return self.network
        (plain,) = self._plain
        fill_plain(plain, self.network)
        return plain.train(self.network.training).to(self.device)

    def on_fit_start(self) -> None:
        """Let every process go through its own share of the validation, however uneven the shares are.

        DDP would send its buffers around in each forward pass, and the process with more batches would wait for ever.
        Ours are constants.
        """
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.broadcast_buffers = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss in nats per token of one part of a step."""
        loss = self.network.loss(*batch)
        self._parts.append((batch, loss.detach()))
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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = gradient_norm(parameters)
        # Losses and norm are read together, once a step: the one moment at which a GPU is waited for.
        *losses, self.grad_norm = torch.stack([*(loss for _, loss in self._parts), norm]).tolist()
        if not math.isfinite(sum(losses) + self.grad_norm):
            lr = float(optimizer.param_groups[0]["lr"])
            batches = [batch for batch, _ in self._parts]
            raise Diverged(self.trainer.global_step + 1, first_nonfinite(self.network, batches), lr)
        self.step_losses, self._parts = losses, []
        if self.optim.grad_clip and self.grad_norm > self.optim.grad_clip:
            clip_gradients(parameters, self.optim.grad_clip, norm)

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
        if self.share[0] > 1:
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
