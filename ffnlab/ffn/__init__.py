"""The feed-forward blocks under study, and how a configuration becomes one."""

from ffnlab.ffn.activations import ACTIVATIONS, Swish, make_activation
from ffnlab.ffn.blocks import DenseFFN, GatedFFN
from ffnlab.ffn.factory import BlockFactory, check_options, locate, make_block
from ffnlab.ffn.trial import blamed_on, try_block

__all__ = [
    "ACTIVATIONS",
    "BlockFactory",
    "DenseFFN",
    "GatedFFN",
    "Swish",
    "blamed_on",
    "check_options",
    "locate",
    "make_activation",
    "make_block",
    "try_block",
]
