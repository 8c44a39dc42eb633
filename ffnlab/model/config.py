"""The sizes and choices that define the network around the block under study."""

from dataclasses import dataclass
from typing import Literal

from ffnlab.errors import UserError


@dataclass
class ModelConfig:
    """A decoder-only Transformer; the defaults are the ``tiny`` preset.

    ``norm_placement`` ``pre`` is ``x + f(norm(x))`` with a final norm, ``post`` is ``norm(x + f(x))`` (Xiong et al. 2020,
    arXiv 2002.04745). ``positions`` ``rope`` rotates queries and keys (Su et al. 2021, arXiv 2104.09864). ``bias`` gives
    one to the attention projections and to LayerNorm; the block under study has its own.
    """

    d_model: int = 96
    n_layers: int = 4
    n_heads: int = 3
    context_length: int = 128
    block: Literal["sequential"] = "sequential"
    norm_placement: Literal["pre", "post"] = "pre"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    positions: Literal["learned", "rope", "none"] = "learned"
    tied_head: bool = True
    bias: bool = False
    dropout_attention: float = 0.0
    dropout_embedding: float = 0.0

    def check(self) -> None:
        """Refuse sizes that cannot make a network.

        Raises:
            UserError: with what to change.
        """
        for name in ("d_model", "n_layers", "n_heads", "context_length"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} must be positive, not {getattr(self, name)}")
        for name in ("dropout_attention", "dropout_embedding"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"model.{name} must lie in [0, 1), not {getattr(self, name)}")
        if not self.norm_eps > 0:
            raise UserError(f"model.norm_eps must be positive, not {self.norm_eps}")
        if self.d_model % self.n_heads:
            fits = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
            near = min(fits, key=lambda n: abs(n - self.n_heads))
            raise UserError(
                f"model.n_heads={self.n_heads} does not divide model.d_model={self.d_model}; {near} heads would"
            )
        head = self.d_model // self.n_heads
        if self.positions == "rope" and head % 2:
            raise UserError(
                f"model.positions=rope rotates pairs, so d_model / n_heads must be even, not {head}; "
                "change model.n_heads or model.d_model"
            )
