"""Training one configuration: ``train(cfg)`` from a notebook, a test or the command line."""

from ffnlab.training.guard import Diverged
from ffnlab.training.interruption import Interrupted
from ffnlab.training.run import LoadedRun, load_config, load_run, prepare_run, train

__all__ = ["Diverged", "Interrupted", "LoadedRun", "load_config", "load_run", "prepare_run", "train"]
