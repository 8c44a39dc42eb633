"""Weights & Biases as a view of the ledger: it may be offline, slow or broken, and the run goes on."""

import base64
import http.client
import json
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger
from rich.console import Console

from ffnlab.config import RunConfig, WandbConfig, to_plain

PATIENCE_S = 3.0  # for each of: reaching the server, starting a run, finishing one


def _api_key() -> str | None:
    """The key that is configured: in the environment, or in netrc."""
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    try:  # where `wandb login` keeps it; asking wandb itself may wait for the network
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(_server()).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def _refusal(key: str) -> str | None:
    """Why the server cannot be used, in words; None if it knows the key. wandb itself would try for minutes."""
    host = urlparse(_server()).hostname
    request = urllib.request.Request(
        f"{_server().rstrip('/')}/graphql",
        data=json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
        headers={
            "Content-Type": "application/json",
            "User-Agent": "ffnlab",
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.loads(response.read(1_000_000))
    except urllib.error.HTTPError as error:
        return f"{host} refuses the key" if error.code in (401, 403) else f"{host} answers with status {error.code}"
    except (OSError, http.client.HTTPException):
        return f"{host} does not answer"
    except ValueError:
        return f"{host} is no W&B server"
    data = answer.get("data") if isinstance(answer, dict) else None
    return None if isinstance(data, dict) and data.get("viewer") else f"{host} refuses the key"


def choose_mode(cfg: WandbConfig) -> tuple[str, str]:
    """``online``, ``offline`` or ``disabled``, and why, in words."""
    asked = os.environ.get("WANDB_MODE")
    if asked in ("offline", "disabled", "dryrun"):
        return ("offline" if asked == "dryrun" else asked), f"WANDB_MODE={asked}"
    if cfg.mode == "offline":
        return "offline", "logger.mode=offline"
    key = _api_key()
    if key is None:
        return "offline", "no API key is configured (wandb login)"
    why = _refusal(key)
    return ("online", "") if why is None else ("offline", why)


class StepAxes(WandbLogger):
    """Adds the axes ``step`` and ``tokens`` to every point, as the ledger has them; falls silent when W&B fails."""

    def __init__(self, tokens_per_step: int, say: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tokens_per_step, self._say = tokens_per_step, say
        self.broken = False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one point."""
        at = int(step or 0)
        self.attempt(lambda run: run.log({**metrics, "step": at, "tokens": at * self._tokens_per_step}))

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures."""
        self.attempt(lambda run: WandbLogger.log_image(self, key, images, step, **kwargs))

    def attempt(self, action: Callable[[Any], object]) -> None:
        """Do something with W&B's run, unless it failed before; the first failure is said, and stops nothing."""
        if self.broken:
            return
        try:
            action(self.experiment)
        except Exception as error:  # whatever its client raises
            self.broken = True
            why = (str(error) or type(error).__name__).splitlines()[0]
            self._say(f"W&B stopped on the way ({why}); the ledger goes on without it")


def open_wandb(
    cfg: RunConfig, run_dir: Path, tokens_per_step: int, console: Console, run_id: str | None = None
) -> StepAxes | None:
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
                    init_timeout=PATIENCE_S if attempt == "online" else 60,  # offline: a busy machine
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
    say = partial(console.print, highlight=False, soft_wrap=True)
    return StepAxes(tokens_per_step, say, experiment=run, save_dir=str(run_dir))


def _define_axes(run: Any) -> None:
    run.define_metric("step", hidden=True)
    run.define_metric("tokens", hidden=True)
    run.define_metric("*", step_metric="step")
    run.define_metric("val/loss", step_metric="tokens")
    run.define_metric("train/loss", step_metric="tokens")


def close_wandb(logger: StepAxes | None, result: dict[str, float], failed: bool) -> None:
    """Hand over the result as the run's summary and finish, within the patience set at the start.

    The files of a run that does not finish cleanly are there and can be sent later.
    """
    if logger is not None:
        logger.attempt(lambda run: run.summary.update(result))
        logger.attempt(lambda run: run.finish(exit_code=1 if failed else 0))
