"""All initialisation, in one place, by parameter name.

Each parameter draws from a generator of its own, seeded by (init_seed, name). Two networks that differ in their FFN
alone therefore start from bit-identical attention, embedding and norm weights, whatever was built first.

============================  ==============================================  ==============================
name                          ``gpt2``                                        ``xavier``
============================  ==============================================  ==============================
``*_norm.weight``             1                                               1
``*.bias``                    0                                               0
``*.attention.out.weight``    N(0, 0.02 / sqrt(2 n_layers))                   N(0, G)
``*.ffn.down.weight``         ``scaled``: N(0, 0.02 / sqrt(2 n_layers));      ``scaled``, ``normal``: N(0, G);
                              ``normal``: N(0, 0.02); ``zero``: 0             ``zero``: 0
any other matrix of a layer   N(0, 0.02)                                      N(0, G)
embeddings, head              N(0, 0.02)                                      N(0, 0.02)
any other scalar or vector    as its module made it (a learnable beta, a user's gain)
parts of a parametrisation    as its module made them (weight_norm's length and direction, say)
============================  ==============================================  ==============================

``gpt2`` is Radford et al. 2019. ``xavier`` is Glorot and Bengio 2010, eq. 12, G = sqrt(2 / (fan_in + fan_out)), as
Vaswani et al. 2017 start their Post-LN. What ``gpt2`` divides by sqrt(2 n_layers) is what adds up over depth in the
stream of Pre-LN; Post-LN normalises its stream after every addition, so there nothing adds up and nothing is divided.
``auto`` takes ``gpt2`` for Pre-LN and ``xavier`` for Post-LN, which from GPT-2's small weights does not leave the loss
of a unigram model: next to a stream of norm 1 each layer says almost nothing, and gradients shrink with it.
"""

import hashlib
import math
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import nn

from ffnlab.ffn import BlockFactory
from ffnlab.model.config import ModelConfig, Scheme
from ffnlab.model.language_model import LanguageModel

DownInit = Literal["normal", "scaled", "zero"]
STD = 0.02


def _generator(init_seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{init_seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _draw(
    start: torch.Tensor, name: str, scheme: Scheme, down_init: DownInit, n_layers: int, source: torch.Generator
) -> None:
    """Fill ``start``, a matrix or more."""
    down = fnmatch(name, "*.ffn.down.weight")
    if down and down_init == "zero":
        start.zero_()
    elif scheme == "xavier" and ".blocks." in f".{name}":
        nn.init.xavier_normal_(start, generator=source)
    else:
        scaled = down_init == "scaled" if down else fnmatch(name, "*.attention.out.weight")
        start.normal_(0.0, STD / math.sqrt(2 * n_layers) if scaled else STD, generator=source)


def _is_part(name: str) -> bool:
    return ".parametrizations." in name or name.endswith((".weight_g", ".weight_v"))


@torch.no_grad()
def initialise(model: LanguageModel, init_seed: int, down_init: DownInit = "scaled", scheme: Scheme = "gpt2") -> None:
    """Set every parameter as the table above says. A tied head is drawn once, as the embedding."""
    for name, parameter in model.named_parameters():
        if name.endswith("_norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.fill_(0.0)
        elif parameter.ndim >= 2 and not _is_part(name):
            start = torch.zeros(parameter.shape)
            _draw(start, name, scheme, down_init, model.n_layers, _generator(init_seed, name))
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
    initialise(model, init_seed, down_init, cfg.init_scheme)
    return model


def shared_init_hash(model: LanguageModel) -> str:
    """Hash of every parameter outside the FFNs: equal for two blocks that were paired rightly."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".ffn." not in name:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
