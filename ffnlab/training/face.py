"""The table before a run, and the lines after it."""

import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ffnlab.budget import Budget
from ffnlab.call import call, program
from ffnlab.config import RunConfig
from ffnlab.model import LanguageModel


def parameters_by_part(network: LanguageModel) -> dict[str, int]:
    """Parameters of embeddings, attention, FFN, norms and head; a tied head counts nothing."""
    parts = {"embeddings": 0, "attention": 0, "ffn": 0, "norms": 0, "head": 0}
    for name, parameter in network.named_parameters():
        if ".ffn." in name:
            part = "ffn"
        elif "norm" in name:
            part = "norms"
        elif ".attention." in name:
            part = "attention"
        elif "embedding" in name:
            part = "embeddings"
        else:
            part = "head"
        parts[part] += parameter.numel()
    return parts | {"total": sum(parts.values())}


def _share(part: float) -> str:
    return f"{part:.0%} of parameters" if part >= 0.005 or part == 0 else "under 1% of parameters"


class Terminal(Console):
    """A console whose reader may leave, as ``| head`` does: what is being trained goes on."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_table(
    cfg: RunConfig,
    budget: Budget,
    parameters: dict[str, int],
    flops_per_token: int,
    n_steps: int,
    tokens_per_step: int,
) -> Table:
    """One table that says what is about to be trained."""
    table = Table(title=f"{cfg.ffn.name} · seed {cfg.seed}", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    total = parameters["total"]
    for part in ("embeddings", "attention", "ffn", "norms", "head"):
        note = "tied to the embeddings" if part == "head" and not parameters[part] else ""
        table.add_row(part, f"{parameters[part]:,}", note or _share(parameters[part] / total))
    table.add_row("total", f"{total:,}", "parameters")
    table.add_row(
        "d_ff", f"{budget.d_ff:,}", f"for d_model {cfg.model.d_model}, to a multiple of {cfg.budget.multiple_of}"
    )
    if budget.matched:
        against = budget.reference_params if budget.kind == "params" else budget.reference_flops
        table.add_row("mismatch", f"{budget.mismatch:+.2%}", f"against {against:,} {budget.kind} of a dense block")
    else:
        table.add_row("mismatch", f"{budget.mismatch:+.2%}", "[red]unmatched[/red]: budget=none")
    table.add_row("FLOPs", f"{flops_per_token:,}", "per token, forward and backward")
    table.add_row("tokens", f"{n_steps * tokens_per_step:,}", f"{tokens_per_step:,} a step")
    table.add_row("steps", f"{n_steps:,}", _schedule(cfg, n_steps))
    return table


def say_result(
    console: Console, run_dir: Path, result: dict[str, float], unigram_loss: float | None, wandb_dir: Path | None
) -> None:
    """Where the run's files are and how to look at them."""
    line = f"val/loss {result['val/loss']:.4f} nats per token"
    if "val/bpb" in result:
        line += f", {result['val/bpb']:.4f} bits per byte"
    console.print(
        f"[bold]{line}[/bold] on {result['val/tokens']:,.0f} tokens, after {result['seconds']:.0f} s "
        f"({result['tokens_per_s']:,.0f} tokens/s)",
        highlight=False,
        soft_wrap=True,
    )
    lines = [f"run       {run_dir}"]
    if unigram_loss is not None:  # it was text that was learned
        lines.insert(0, f"a unigram model of the same tokens: {unigram_loss:.4f} nats per token")
        lines.append(f"sample    {call('scripts/sample.py', run_dir, '--prompt', 'To be')}")
    if wandb_dir is not None:  # a command a line, to be pasted
        lines += [f"W&B       {shlex.join([program('wandb'), verb, str(wandb_dir)])}" for verb in ("sync", "leet")]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _schedule(cfg: RunConfig, n_steps: int) -> str:
    """The rate's course in words."""
    if cfg.optim.warmup >= n_steps:
        return f"all warm-up (takes {cfg.optim.warmup}): optim.lr is not reached"
    return f"warm-up {cfg.optim.warmup}, then {cfg.optim.schedule}"
