"""Training one configuration: ``train(cfg)`` from a notebook, a test or the command line."""

from ffnlab.signals import Interrupted
from ffnlab.training.guard import Diverged
from ffnlab.training.loading import LoadedRun, load_config, load_run
from ffnlab.training.preparation import Prepared, prepare_run
from ffnlab.training.run import train

__all__ = ["Diverged", "Interrupted", "LoadedRun", "Prepared", "load_config", "load_run", "prepare_run", "train"]
