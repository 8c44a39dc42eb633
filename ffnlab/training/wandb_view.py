"""Weights & Biases as a view of the ledger: it may be offline, slow or broken, and the run goes on."""

import netrc
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger
from rich.console import Console

from ffnlab.config import RunConfig, WandbConfig, to_plain

PATIENCE_S = 4.0  # for each of: reaching the server, starting a run, finishing one


def _api_key() -> bool:
    """Whether a key is configured: in the environment, or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(_server()).hostname or ""
    try:  # where `wandb login` keeps it; asking wandb itself may wait for the network
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def _answers(url: str) -> bool:
    """Whether something accepts connections where the server should be."""
    parsed = urlparse(url)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        with socket.create_connection((parsed.hostname or "", port), timeout=PATIENCE_S):
            return True
    except OSError:
        return False


def choose_mode(cfg: WandbConfig) -> tuple[str, str]:
    """``online``, ``offline`` or ``disabled``, and why, in words."""
    asked = os.environ.get("WANDB_MODE")
    if asked in ("offline", "disabled", "dryrun"):
        return ("offline" if asked == "dryrun" else asked), f"WANDB_MODE={asked}"
    if cfg.mode == "offline":
        return "offline", "logger.mode=offline"
    if not _api_key():
        return "offline", "no API key is configured (wandb login)"
    if not _answers(_server()):
        return "offline", f"{urlparse(_server()).hostname} does not answer"
    return "online", ""


class StepAxes(WandbLogger):
    """Adds the axes ``step`` and ``tokens`` to every point, as the ledger has them."""

    def __init__(self, tokens_per_step: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tokens_per_step = tokens_per_step

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one point."""
        at = int(step or 0)
        self.experiment.log({**metrics, "step": at, "tokens": at * self._tokens_per_step})


def open_wandb(
    cfg: RunConfig, run_dir: Path, tokens_per_step: int, console: Console, run_id: str | None = None
) -> WandbLogger | None:
    """Start W&B's run: grouped by study, its job type the block, with the resolved configuration.

    Never prompts. What goes wrong online is said in one line, and the run goes on offline; what goes wrong offline too
    leaves the ledger alone (None).
    """
    if not isinstance(cfg.logger, WandbConfig):
        return None
    import wandb

    mode, why = choose_mode(cfg.logger)
    if mode == "disabled":
        return None
    # The service prints nothing of its own; the run says at the end where its files are.
    os.environ.setdefault("WANDB_SILENT", "true")
    for attempt in (mode, "offline"):
        try:
            run = wandb.init(
                project=cfg.logger.project,
                entity=cfg.logger.entity,
                dir=str(run_dir),
                id=run_id,
                resume="allow" if run_id and attempt == "online" else None,
                name=run_dir.name,
                group=cfg.study,
                job_type=cfg.ffn.name,
                config=to_plain(cfg),
                mode=attempt,  # type: ignore[arg-type]
                reinit="create_new",
                settings=wandb.Settings(
                    init_timeout=PATIENCE_S,
                    finish_timeout=PATIENCE_S,
                    login_timeout=PATIENCE_S,
                    summary_timeout=2,
                    x_graphql_retry_max=1,
                    console="off",
                    save_code=False,
                    disable_git=True,
                    silent=True,
                ),
            )
            break
        except Exception as error:  # a view must not stop the run, whatever its client raises
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
    else:
        console.print(f"W&B cannot start ({why}); the ledger in {run_dir} is complete without it", highlight=False)
        return None
    if run.settings._offline:
        console.print(f"W&B is offline: {why}", highlight=False)
    _define_axes(run)
    return StepAxes(tokens_per_step, experiment=run, save_dir=str(run_dir))


def _define_axes(run: Any) -> None:
    run.define_metric("step", hidden=True)
    run.define_metric("tokens", hidden=True)
    run.define_metric("*", step_metric="step")
    run.define_metric("val/loss", step_metric="tokens")
    run.define_metric("train/loss", step_metric="tokens")


def close_wandb(logger: WandbLogger | None, result: dict[str, float], failed: bool) -> None:
    """Hand over the result as the run's summary and finish, within the patience set at the start."""
    if logger is None:
        return
    try:
        run = logger.experiment
        run.summary.update(result)
        run.finish(exit_code=1 if failed else 0)
    except Exception as error:
        # The files are there and can be sent later.
        Console(stderr=True).print(f"W&B did not finish cleanly: {type(error).__name__}: {error}", highlight=False)
