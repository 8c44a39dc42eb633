"""The sizes and choices that define the network around the block under study."""

from typing import Literal

from pydantic.dataclasses import dataclass

from ffnlab.errors import UserError
from ffnlab.schema import STRICT, PositiveFloat, PositiveInt, Rate

Scheme = Literal["gpt2", "xavier"]
MOST_HEADS = 65_536


@dataclass(config=STRICT)
class ModelConfig:
    """A decoder-only Transformer; the defaults are the ``tiny`` preset.

    ``norm_placement`` ``pre`` is ``x + f(norm(x))`` with a final norm, ``post`` is ``norm(x + f(x))`` (Xiong et al.
    2020, arXiv 2002.04745). ``init`` says how large weights start (``ffnlab/model/init.py``). ``positions`` ``rope``
    rotates queries and keys (Su et al. 2021, arXiv 2104.09864). ``bias`` gives one to the attention projections and to
    LayerNorm; the block under study has its own.
    """

    d_model: PositiveInt = 96
    n_layers: PositiveInt = 4
    n_heads: PositiveInt = 3
    context_length: PositiveInt = 128
    block: Literal["sequential"] = "sequential"
    norm_placement: Literal["pre", "post"] = "pre"
    init: Literal["auto", "gpt2", "xavier"] = "auto"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    positions: Literal["learned", "rope", "none"] = "learned"
    tied_head: bool = True
    bias: bool = False
    dropout_attention: Rate = 0.0
    dropout_embedding: Rate = 0.0

    @property
    def init_scheme(self) -> Scheme:
        """``init``, with ``auto`` decided."""
        if self.init != "auto":
            return self.init
        return "gpt2" if self.norm_placement == "pre" else "xavier"

    def check(self) -> None:
        """Refuse sizes that do not go together.

        Raises:
            UserError: with what to change.
        """
        if self.d_model % self.n_heads:
            # Heads beyond the widest networks there are would only take time to look for.
            fits = [n for n in range(1, min(self.d_model, MOST_HEADS) + 1) if self.d_model % n == 0]
            near = min(fits, key=lambda n: abs(n - self.n_heads))
            raise UserError(f"model.n_heads={self.n_heads} does not divide model.d_model={self.d_model}; {near} would")
        head = self.d_model // self.n_heads
        if self.positions == "rope" and head % 2:
            raise UserError(
                f"model.positions=rope rotates pairs, so d_model / n_heads must be even, not {head}; "
                "change model.n_heads or model.d_model"
            )
