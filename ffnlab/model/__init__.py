"""The Transformer around the block under study."""

from ffnlab.model.config import ModelConfig
from ffnlab.model.head_loss import IGNORE
from ffnlab.model.init import DownInit, build, initialise, shared_init_hash
from ffnlab.model.language_model import Block, LanguageModel

__all__ = [
    "IGNORE",
    "Block",
    "DownInit",
    "LanguageModel",
    "ModelConfig",
    "build",
    "initialise",
    "shared_init_hash",
]
