"""The copy task as a smoke test: stop as soon as it is solved, and say what is wrong when it is not.

Solved means both: the loss on the copied half, over all fixed sequences and in eval mode, is under the goal; and greedy
generation from ``BOS, x, SEP`` alone reproduces every one of them. The second cannot be had by seeing the future.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from rich.console import Console
from torch import Tensor, nn

from ffnlab.config import CopyTaskConfig
from ffnlab.data import CopyTask
from ffnlab.errors import UserError
from ffnlab.model import LanguageModel
from ffnlab.training.guard import Diverged
from ffnlab.training.parallel import whole

STILL = 0.01  # a relative change of the loss that counts as none
FALLING = 0.05  # a relative fall over the last quarter of the run that more steps would carry on
# How far the weights went, as a multiple of where they started. The default rate takes a healthy network 0.9 in ten
# steps and 2 to 7 until it has solved the task; 1e-5 takes it 0.1 in three hundred, and 0.05 more than 30.
NEAR, FAR = 0.4, 15.0
AT_CHANCE = 0.95  # of the loss of a guess among all symbols
WIRING = "norm or residual wired wrong"
LOOK_EVERY = 10  # steps between two measurements while the goal is far off


class CopyTaskFailed(UserError):
    """The copy task was not solved; the text says which of the causes that can be told apart it was."""


@dataclass
class Evidence:
    """What the run showed.

    ``losses`` are pairs (step, loss in eval mode), ``chance`` the loss of a guess. ``moved`` is how far the typical
    weight matrix went from its start, in multiples of that start. ``starved`` names parameters that never received a
    gradient; ``dropout`` is the largest rate in the network; ``foreign`` the feed-forward block's class where it is not
    one of this project's, empty otherwise.
    """

    goal: float
    chance: float = float("inf")
    losses: list[tuple[int, float]] = field(default_factory=list)
    exact: int = 0
    n: int = 0
    step: int = 0
    lr: float = 0.0
    moved: float = float("nan")
    dropout: float = 0.0
    starved: list[str] = field(default_factory=list)
    foreign: str = ""

    def see(self, loss: float) -> None:
        """Take in one measurement."""
        self.losses.append((self.step, loss))

    @property
    def first(self) -> float:
        """The loss at the start."""
        return self.losses[0][1] if self.losses else math.nan

    @property
    def last(self) -> float:
        """The loss at the end."""
        return self.losses[-1][1] if self.losses else math.nan

    @property
    def solved(self) -> bool:
        """Both conditions hold."""
        return self.last < self.goal and self.exact == self.n > 0

    @property
    def still(self) -> bool:
        """The loss never left where it was."""
        return max(abs(loss - self.first) for _, loss in self.losses) <= STILL * self.first

    @property
    def fall(self) -> float:
        """By how much of itself the loss fell from the third to the last quarter of the run; medians, for the noise."""
        late = [loss for step, loss in self.losses if step > 0.75 * self.step]
        before = [loss for step, loss in self.losses if step <= 0.75 * self.step]
        third = [loss for step, loss in self.losses if 0.5 * self.step < step <= 0.75 * self.step] or before[-1:]
        return 1 - statistics.median(late) / statistics.median(third) if late and third else 0.0


def diagnose(seen: Evidence) -> str:
    """The likely cause of a failure: what the run itself shows comes before what it leaves to be guessed."""
    if seen.last < seen.goal:
        leak = (
            f"copy task: the loss is {seen.last:.4f}, yet generation reproduces {seen.exact} of {seen.n} sequences: "
            "a leak from the future; "
        )
        if seen.foreign:
            leak += f"does {seen.foreign} mix tokens ('token independence' in scripts/check_ffn.py tells)? If not, "
        return leak + "is attention causal?"
    course = f"({seen.first:.3f} at the start, {seen.last:.3f} after {seen.step} steps"
    if seen.still:
        if seen.lr == 0:
            cause = "optim.lr is 0"
        elif seen.starved:
            cause = f"dead gradient, none reaches {_some(seen.starved)}"
        else:
            cause = f"the learning rate, {seen.lr:g} at most, is too small for so few steps"
        return f"copy task: the loss never moved {course}): {cause}"
    course += f", goal {seen.goal:g})"
    dead = [f"dead gradient in {_some(seen.starved)}"] if seen.starved else []
    dropout = [f"dropout too high (up to {seen.dropout:g})"] if seen.dropout > 0 else []
    if seen.moved < NEAR:
        cause = f"the learning rate, {seen.lr:g} at most, is too small for so few steps"
        cause += f" (the weights moved by {seen.moved:.0%} of their size)"
        return f"copy task: the loss barely moved {course}: {', or '.join([cause, *dead, *dropout])}"
    too_high = seen.last > seen.first or seen.moved > FAR
    if not too_high and seen.last < AT_CHANCE * seen.chance and seen.fall > FALLING:
        cause = f"it needs more steps (train.tokens) or a higher learning rate (optim.lr, now {seen.lr:g})"
        return (
            f"copy task: the loss was still falling {course}: {', or '.join([*dead, cause, *dropout])}; else {WIRING}"
        )
    causes = [f"the learning rate, {seen.lr:g}, too high"] if too_high else []
    causes += [*dead, *dropout]
    if seen.last < AT_CHANCE * seen.chance:
        return f"copy task: the loss moved but is stuck {course}: {', or '.join([*causes, WIRING])}"
    causes.append(f"attention, positions, {WIRING}")
    course = course.replace("goal", f"a guess {seen.chance:.3f}, goal")
    return f"copy task: the loss is no better than a guess {course}: {', or '.join(causes)}"


def not_finite(error: Diverged) -> str:
    """The message for a run that left the numbers."""
    what = "initialisation" if error.step <= 1 else "learning rate or initialisation"
    return (
        f"copy task: not finite in step {error.step}, first in {error.tensor}: {what} "
        f"(optim.lr is {error.lr:g} there; lower it, or look at what that tensor is made from)"
    )


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _foreign(ffn: nn.Module) -> str:
    # Ours are held token by token by tests; wrappers of torch's, FSDP's for one, stand before the class they wrap
    cls = next(cls for cls in type(ffn).__mro__ if not cls.__module__.startswith("torch.distributed"))
    return "" if cls.__module__.startswith("ffnlab.") else cls.__name__


def _matrices(network: LanguageModel) -> dict[str, Tensor]:
    return {
        name: whole(value.detach()).clone().float() for name, value in network.named_parameters() if value.dim() > 1
    }


class CopyTaskGoal(lightning.Callback):
    """Ends the run when the task is solved; otherwise, at its end, raises ``CopyTaskFailed`` with the diagnosis."""

    def __init__(self, cfg: CopyTaskConfig, data: object, console: Console) -> None:
        if not isinstance(data, CopyTask):
            raise TypeError("the copy task's goal needs the copy task's data")
        self.task, self.console = data, console
        self.seen = Evidence(goal=cfg.loss, chance=math.log(data.n_symbols), n=len(data.sequences_NL))
        self._unfed: set[str] | None = None
        self._start: dict[str, Tensor] = {}

    @property
    def result(self) -> dict[str, float]:
        """For the run's result: the loss in eval mode, the share of sequences reproduced, the steps it took."""
        return {
            "copy/loss": self.seen.last,
            "copy/exact": self.seen.exact / self.seen.n,
            "copy/steps": float(self.seen.step),
        }

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """One thread: at this size more gain nothing, and on a busy machine they wait for each other."""
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Give the threads back."""
        torch.set_num_threads(self._threads)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Measure the start."""
        rates = [module.p for module in pl_module.network.modules() if isinstance(module, nn.Dropout)]
        attention = [float(block.attention.dropout) for block in pl_module.network.blocks]
        self.seen.dropout = max([0.0, *rates, *attention])
        self.seen.foreign = _foreign(pl_module.network.blocks[0].ffn)
        self._start = _matrices(pl_module.network)
        self._measure(pl_module.network, generate=False)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Note the rate, and which parameters have had a gradient by now."""
        self.seen.lr = max(self.seen.lr, float(optimizer.param_groups[0]["lr"]))
        parameters = dict(pl_module.network.named_parameters())
        if self._unfed is None:
            self._unfed = set(parameters)
        for name in list(self._unfed):
            gradient = parameters[name].grad
            if gradient is not None and bool(gradient.any()):
                self._unfed.remove(name)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure, often near the goal and seldom far from it, and stop when both conditions hold."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.seen.step = trainer.global_step
        last = trainer.global_step >= trainer.max_steps
        near = pl_module.step_losses[-1] < 5 * self.seen.goal
        if near or last or trainer.global_step % LOOK_EVERY == 0:
            self._measure(pl_module.network, generate=True)
            if self.seen.solved:
                trainer.should_stop = True

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Say how it went.

        Raises:
            CopyTaskFailed: not solved.
        """
        seen = self.seen
        seen.starved = sorted(self._unfed or ())
        now = _matrices(pl_module.network)
        ways = [float((now[name] - start).norm() / start.norm()) for name, start in self._start.items() if start.any()]
        seen.moved = statistics.median(ways)
        if not seen.solved:
            raise CopyTaskFailed(diagnose(seen))
        which = "held-out" if self.task.generalise else "training"
        line = (
            f"copy task solved in {seen.step} steps: loss {seen.last:.4f} < {seen.goal:g}, "
            f"{seen.exact} of {seen.n} {which} sequences reproduced exactly"
        )
        if seen.starved:
            line += f" (but no gradient ever reached {_some(seen.starved)})"
        self.console.print(line, highlight=False, soft_wrap=True)

    @torch.no_grad()
    def _measure(self, network: LanguageModel, generate: bool) -> None:
        """Loss in eval mode over the fixed sequences; below the goal, also greedy generation."""
        device = network.token_embedding.weight.device
        training = network.training
        network.eval()
        # Prompts of growing length would be compiled again and again.
        with torch.compiler.set_stance("force_eager"):
            inputs, targets = next(iter(self.task.val_batches(self.seen.n)))
            self.seen.see(float(network.loss(inputs.to(device), targets.to(device))))
            if generate and self.seen.last < self.seen.goal:
                prompts, answers = (tensor.to(device) for tensor in self.task.prompts())
                written = network.generate(prompts, answers.shape[1], temperature=0)[:, prompts.shape[1] :]
                self.seen.exact = int((written == answers).all(dim=1).sum())
            else:
                self.seen.exact = 0
        network.train(training)
