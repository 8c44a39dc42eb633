"""Each contender lives in a process of its own, with its own allocator and threads, and works when told to.

A worker answers ``("ready", facts)`` once it is warm. Then each ``"go"`` is answered by ``("slice", seconds,
validated)`` and ``"stop"`` by ``("done", facts)``. What goes wrong is answered by ``("error", message)``.
"""

import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning
from rich.console import Console

from ffnlab.bench.setting import Setting

WARM_UP = 3  # steps before a worker is ready


def serve(name: str, setting: Setting, slice_steps: int, n_slices: int, pipe: Connection) -> None:
    """The body of a worker's process."""
    try:
        setting.apply()
        if name == "ffnlab":
            _serve_harness(setting, slice_steps, n_slices, pipe)
        else:
            _serve_loop(name, setting, slice_steps, pipe)
    except (EOFError, BrokenPipeError):  # the parent has gone, and said why
        return
    except Exception as error:  # the parent has to hear of it, whatever it is
        pipe.send(("error", f"{name}: {type(error).__name__}: {error}"))


def _serve_loop(name: str, setting: Setting, slice_steps: int, pipe: Connection) -> None:
    from ffnlab.bench.contenders import describe, make_loop

    loop = make_loop("bare" if name == "products" else name, setting)
    run: Callable[[int], None]
    if name == "products":
        from ffnlab.bench.products import product_runner, square_rate, step_flops, step_products

        products = step_products(loop)
        run = product_runner(products, setting.device)
        facts: dict[str, Any] = {
            "flops": sum(product.flops for product in products),
            "step_flops": step_flops(loop),
            "products": len(products),
            "square_flops_per_s": square_rate(setting, 8192 if setting.device == "cuda" else 1024),
        }
    else:
        run, facts = loop.run, describe(loop)
    run(WARM_UP)
    setting.synchronise()
    pipe.send(("ready", facts))
    while pipe.recv() == "go":
        began = setting.now()
        run(slice_steps)
        setting.synchronise()
        pipe.send(("slice", setting.now() - began, False))
    pipe.send(("done", _peak(setting)))


def _peak(setting: Setting) -> dict[str, Any]:
    return {"peak_bytes": setting.peak_bytes()}


class Relay(lightning.Callback):
    """Stops the harness at the border of every slice until the others have had their turn.

    The waiting is outside the measured time; everything else of the harness is in it: loading, logging, the ledger,
    validation, census, checkpoints.
    """

    def __init__(self, setting: Setting, slice_steps: int, pipe: Connection) -> None:
        self.setting, self.slice_steps, self.pipe = setting, slice_steps, pipe
        self._began = 0.0
        self._validated = self._stopped = False

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """At the border of a slice: report the last one and wait. The first slice is the warm-up."""
        steps = trainer.global_step - WARM_UP
        if steps == 0:
            self.pipe.send(("ready", {"parameters": sum(p.numel() for p in pl_module.parameters())}))
            self._wait()
        elif steps > 0 and steps % self.slice_steps == 0 and not self._stopped:
            self._report()
            self._wait()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Mark the slice: it holds a validation and a census."""
        self._validated = True

    def _report(self) -> None:
        self.setting.synchronise()
        self.pipe.send(("slice", self.setting.now() - self._began, self._validated))

    def _wait(self) -> None:
        self._stopped = self.pipe.recv() == "stop"
        self._validated = False
        self._began = self.setting.now()


def _serve_harness(setting: Setting, slice_steps: int, n_slices: int, pipe: Connection) -> None:
    from ffnlab.data import prepare
    from ffnlab.training import train

    cfg = setting.config()
    # One step more than is raced: training's end, with its last checkpoint, belongs to no slice.
    n_steps = WARM_UP + slice_steps * n_slices + 1
    tokens_per_step = cfg.train.batch_size * prepare(cfg.data, cfg.model.context_length).context_length
    cfg = setting.config(f"train.tokens={n_steps * tokens_per_step}")
    with tempfile.TemporaryDirectory(prefix="ffnlab-bench-") as folder:
        relay = Relay(setting, slice_steps, pipe)
        result = train(cfg, Path(folder) / "run", console=Console(quiet=True), callbacks=[relay])
    pipe.send(("done", {**_peak(setting), "loss": result["val/loss"]}))
