"""The networks that are raced: ours, and what people would use instead, at one shape, each in the same bare loop."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.bench.setting import Setting
from ffnlab.config import RunConfig
from ffnlab.data import Data, prepare
from ffnlab.errors import UserError
from ffnlab.training.optim import make_optimizer
from ffnlab.training.preparation import prepare_run

Loss = Callable[[Tensor, Tensor], Tensor]  # (inputs_BT, targets_BT) -> mean cross-entropy

OURS = ("bare", "compile", "liger")
PEERS = ("gpt2", "gpt2-gelu", "x-transformers")
NEEDS = {  # the package that a contender is made of
    "gpt2": "transformers",
    "gpt2-gelu": "transformers",
    "x-transformers": "x_transformers",
    "liger": "liger_kernel",
}


def missing(name: str) -> str | None:
    """What is to be done so that ``name`` can race; None if it can."""
    package = NEEDS.get(name)
    if package is None or find_spec(package) is not None:
        return None
    extra = "pip install liger-kernel" if name == "liger" else "pip install -e '.[bench]' in the project's folder"
    return f"{name} needs {package}: {extra}"


@dataclass
class BareLoop:
    """The shortest honest training loop: batch, forward, backward, clip, AdamW. Nothing is read back or written."""

    setting: Setting
    cfg: RunConfig
    data: Data
    network: nn.Module
    loss: Loss

    def __post_init__(self) -> None:
        """Move the network and give it the optimiser that every contender gets."""
        self.network.to(self.setting.device).train()
        self.optimizer = make_optimizer(self.network, self.cfg.optim)
        self.step_number = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """The batch of the next step, on the device."""
        inputs_BT, targets_BT = self.data.batch(self.cfg.data_seed, self.step_number, self.cfg.train.batch_size)
        self.step_number += 1
        if self.setting.device == "cpu":
            return inputs_BT, targets_BT
        inputs_BT, targets_BT = (t.pin_memory().to("cuda", non_blocking=True) for t in (inputs_BT, targets_BT))
        return inputs_BT, targets_BT

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss, in the setting's precision."""
        with self.setting.autocast():
            return self.loss(inputs_BT, targets_BT)

    def clip(self) -> None:
        """Clip the gradient's norm as a run does."""
        if self.cfg.optim.grad_clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.cfg.optim.grad_clip)

    def update(self) -> None:
        """One AdamW step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, n_steps: int) -> None:
        """Train ``n_steps`` steps."""
        for _ in range(n_steps):
            self.forward(*self.batch()).backward()
            self.clip()
            self.update()


def make_loop(name: str, setting: Setting) -> BareLoop:
    """Build contender ``name`` (see ``OURS`` and ``PEERS``) for ``setting``.

    Raises:
        UserError: a peer that is not installed.
    """
    cfg = setting.config()
    if lack := missing(name):
        raise UserError(lack)
    if name in OURS:
        prepared = prepare_run(cfg)
        network = prepared.network
        if name == "compile":
            network.compile()
        if name == "liger":
            from ffnlab.bench.liger import use_liger

            use_liger(network)
        return BareLoop(setting, cfg, prepared.data, network, network.loss)
    data = prepare(cfg.data, cfg.model.context_length)
    peer, loss = _PEERS[name](cfg, data)
    return BareLoop(setting, cfg, data, peer, loss)


def _gpt2(cfg: RunConfig, data: Data, activation: str) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns about special tokens, of which there are none here
    options: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    config = GPT2Config(
        vocab_size=data.vocab_size,
        n_positions=data.context_length,
        n_embd=cfg.model.d_model,
        n_layer=cfg.model.n_layers,
        n_head=cfg.model.n_heads,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    network = GPT2LMHeadModel(config)
    # As its users call it: it shifts the labels itself.
    return network, lambda inputs_BT, targets_BT: network(input_ids=inputs_BT, labels=inputs_BT).loss


def _x_transformers(cfg: RunConfig, data: Data) -> tuple[nn.Module, Loss]:
    from x_transformers import Decoder, TransformerWrapper

    network = TransformerWrapper(
        num_tokens=data.vocab_size,
        max_seq_len=data.context_length,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=cfg.model.d_model,
            depth=cfg.model.n_layers,
            heads=cfg.model.n_heads,
            attn_dim_head=cfg.model.d_model // cfg.model.n_heads,
            attn_flash=True,  # not its default, but its faster way
        ),
    )

    def loss(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs_BT).flatten(0, 1), targets_BT.flatten())

    return network, loss


_PEERS: dict[str, Callable[[RunConfig, Data], tuple[nn.Module, Loss]]] = {
    "gpt2": lambda cfg, data: _gpt2(cfg, data, "gelu_new"),  # as it comes: GELU's tanh form, composed of small ops
    "gpt2-gelu": lambda cfg, data: _gpt2(cfg, data, "gelu"),  # the same GELU as ours: one kernel
    "x-transformers": _x_transformers,
}


def describe(loop: BareLoop) -> dict[str, Any]:
    """Sizes, for the record."""
    return {"parameters": sum(p.numel() for p in loop.network.parameters())}
