"""Liger's fused kernels for SwiGLU and GEGLU (they need a GPU), put into a network of ours for comparison."""

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.ffn import GatedFFN
from ffnlab.model import LanguageModel


class LigerGated(nn.Module):
    """A ``GatedFFN`` whose ``act(gate) * up`` is one kernel. It shares the block's parameters."""

    def __init__(self, block: GatedFFN) -> None:
        super().__init__()
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        if isinstance(block.act, nn.SiLU):
            self.fused: type[torch.autograd.Function] = LigerSiLUMulFunction
        elif isinstance(block.act, nn.GELU):
            self.fused = LigerGELUMulFunction  # the tanh form, whichever the block has
        else:
            raise UserError("Liger has kernels for silu and gelu gates: ffn=swiglu or ffn=geglu")
        self.gate, self.up, self.down = block.gate, block.up, block.down

    def forward(self, x_D: Tensor) -> Tensor:
        """Map ``(..., d_model)`` to ``(..., d_model)``."""
        hidden_F: Tensor = self.fused.apply(self.gate(x_D), self.up(x_D))
        return self.down(hidden_F)


def use_liger(network: LanguageModel) -> None:
    """Replace the elementwise part of every FFN of ``network``.

    Raises:
        UserError: the blocks are not ``GatedFFN`` with silu or gelu.
    """
    for block in network.blocks:
        if not isinstance(block.ffn, GatedFFN):
            raise UserError("Liger has kernels for gated blocks: ffn=swiglu or ffn=geglu")
        block.ffn = LigerGated(block.ffn)
