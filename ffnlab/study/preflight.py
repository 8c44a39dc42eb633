"""Before the first real step of a study: every cell is sized, and every configuration is run for two steps."""

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

import lightning
import torch

from ffnlab.census.callback import CensusCallback
from ffnlab.config import RunConfig
from ffnlab.data import Data, prepare
from ffnlab.errors import UserError
from ffnlab.study.cells import Cell, configuration
from ffnlab.study.resources import clean_torch
from ffnlab.training import Diverged, prepare_run
from ffnlab.training.batches import Cut, TrainStream, ValStream
from ffnlab.training.engine import quiet_libraries, trainer_arguments
from ffnlab.training.module import LMModule
from ffnlab.training.preparation import Prepared

STEPS = 2
CENSUS_TOKENS = 256


class Datasets:
    """Prepared data, once for each configuration of it; ``hash`` is what a cell's record should hold."""

    def __init__(self) -> None:
        self._known: dict[str, Data] = {}

    def hash(self, cfg: RunConfig) -> str:
        """The hash of a cell's data.

        Raises:
            UserError: the data cannot be prepared.
        """
        key = f"{cfg.data!r} {cfg.model.context_length}"
        if key not in self._known:
            self._known[key] = prepare(cfg.data, cfg.model.context_length)
        return self._known[key].hash


def preflight(cells: Iterable[Cell], on_cpu: bool) -> int:
    """Size every cell and run every configuration for two steps; returns the number of configurations.

    Cells that differ in their seeds alone are one configuration. A loss that is not finite is a result, not a mistake.

    Args:
        cells: what is about to be run.
        on_cpu: the cells will run on other machines, whose devices are not here to be tried.

    Raises:
        UserError: one line for each configuration that cannot run.
    """
    quiet_libraries()
    tried: set[str] = set()
    problems: list[str] = []
    # Each configuration first, so that a mistake shows before the many seeds are sized.
    for cell in _distinct_first(cells):
        key = configuration(cell.cfg)
        try:
            if key in tried:
                if not problems:
                    prepare_run(cell.cfg)
                continue
            tried.add(key)
            with clean_torch():
                _two_steps(cell.cfg, prepare_run(cell.cfg), on_cpu)
        except Diverged:
            continue
        except UserError as error:
            problems.append(f"{cell.name} ({' '.join(cell.overrides)}): {error}")
        except Exception as error:  # whatever a block of the user's own may raise
            first = str(error).strip().splitlines()
            problems.append(
                f"{cell.name} ({' '.join(cell.overrides)}): {type(error).__name__}: {first[0] if first else ''}"
            )
    if problems:
        raise UserError("\n".join([*dict.fromkeys(problems), "nothing was started"]))
    return len(tried)


def _distinct_first(cells: Iterable[Cell]) -> list[Cell]:
    seen: set[str] = set()
    first: list[Cell] = []
    rest: list[Cell] = []
    for cell in cells:
        key = configuration(cell.cfg)
        (rest if key in seen else first).append(cell)
        seen.add(key)
    return first + rest


def _two_steps(cfg: RunConfig, prepared: Prepared, on_cpu: bool) -> None:
    arguments = trainer_arguments(cfg)
    if on_cpu:
        arguments |= {"accelerator": "cpu", "devices": 1, "precision": "32-true"}
    module = LMModule(prepared.network, cfg.optim, prepared.n_steps, prepared.data.bytes_per_token)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parts = int(arguments.get("accumulate_grad_batches", 1))
    with tempfile.TemporaryDirectory(prefix="ffnlab-preflight-") as folder:
        census = CensusCallback(prepared.data, Path(folder), CENSUS_TOKENS, CENSUS_TOKENS)
        trainer = lightning.Trainer(
            **arguments,
            max_steps=STEPS,
            max_epochs=-1,
            val_check_interval=STEPS * parts,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            logger=False,
            use_distributed_sampler=False,
            callbacks=[census],
        )
        stream = TrainStream(prepared.data, cfg.data_seed, Cut(cfg.train.batch_size, parts, 1, 0), lambda: 0)
        val = ValStream(prepared.data, cfg.train.val_batch_size, CENSUS_TOKENS, 1, 0)
        random = torch.get_rng_state()
        try:
            trainer.fit(module, stream, val)
        finally:
            torch.set_rng_state(random)
