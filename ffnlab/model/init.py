"""All initialisation, in one place, by parameter name.

Each parameter draws from a generator of its own, seeded by (init_seed, name). Two networks that differ in their FFN
alone therefore start from bit-identical attention, embedding and norm weights, whatever was built first.

============================  =====================================================================
name                          start
============================  =====================================================================
``*_norm.weight``             1
``*.bias``                    0
``*.ffn.down.weight``         ``normal``: N(0, 0.02); ``scaled``: N(0, 0.02 / sqrt(2 n_layers)), as
                              GPT-2 (Radford et al. 2019); ``zero``: 0
``*.attention.out.weight``    N(0, 0.02 / sqrt(2 n_layers))
any other matrix              N(0, 0.02)
any other scalar or vector    as its module made it (a learnable beta, a user's gain)
============================  =====================================================================
"""

import hashlib
import math
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import nn

from ffnlab.ffn import BlockFactory
from ffnlab.model.config import ModelConfig
from ffnlab.model.language_model import LanguageModel

DownInit = Literal["normal", "scaled", "zero"]
STD = 0.02


def _generator(init_seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{init_seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _std(name: str, parameter: nn.Parameter, n_layers: int, down_init: DownInit) -> float | None:
    """Standard deviation of a parameter's start, or None for one that keeps what its module gave it."""
    scaled = STD / math.sqrt(2 * n_layers)
    if fnmatch(name, "*.ffn.down.weight"):
        return {"normal": STD, "scaled": scaled, "zero": 0.0}[down_init]
    if fnmatch(name, "*.attention.out.weight"):
        return scaled
    if name.endswith(".bias"):
        return 0.0
    return STD if parameter.ndim >= 2 else None


@torch.no_grad()
def initialise(model: LanguageModel, init_seed: int, down_init: DownInit = "scaled") -> None:
    """Set every parameter as the table above says. A tied head is drawn once, as the embedding."""
    for name, parameter in model.named_parameters():
        if name.endswith("_norm.weight"):
            parameter.fill_(1.0)
            continue
        std = _std(name, parameter, model.n_layers, down_init)
        if std is not None:
            start = torch.zeros(parameter.shape)
            if std:
                start.normal_(0.0, std, generator=_generator(init_seed, name))
            parameter.copy_(start)


def build(
    cfg: ModelConfig,
    vocab_size: int,
    factory: BlockFactory,
    d_ff: int,
    init_seed: int,
    down_init: DownInit = "scaled",
) -> LanguageModel:
    """Build a network with ``factory(d_model, d_ff)`` as its FFN, and initialise it.

    The global random stream is left as it was found; what a constructor draws for itself is a function of init_seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        model = LanguageModel(cfg, vocab_size, lambda: factory(cfg.d_model, d_ff))
    initialise(model, init_seed, down_init)
    return model


def shared_init_hash(model: LanguageModel) -> str:
    """Hash of every parameter outside the FFNs: equal for two blocks that were paired rightly."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".ffn." not in name:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
