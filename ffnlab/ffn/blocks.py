"""The two blocks that cover the published feed-forward family.

Shape suffix: ``x_D`` means ``(..., d_model)``, ``h_F`` means ``(..., d_ff)``. Every block works token by token,
so the leading dimensions are free.

The contract of any block, ours or yours: it is built as ``Block(d_model, d_ff, **options)``, maps ``(..., d_model)``
to ``(..., d_model)`` and its last projection is ``self.down: nn.Linear(d_ff, d_model)``. A submodule named ``act``,
where there is one, receives the pre-activation; the census reads it there.
"""

from torch import Tensor, nn

from ffnlab.ffn.activations import make_activation


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive whole number, not {size!r}")


def _dropout(name: str, rate: float) -> nn.Dropout:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), not {rate}")
    return nn.Dropout(rate)


class DenseFFN(nn.Module):
    """``down(act(up(x)))``, the block of Vaswani et al. 2017 (arXiv 1706.03762, eq. 2) with any activation.

    Args:
        d_model: width of the residual stream.
        d_ff: number of neurons.
        activation: a name from ``ffnlab.ffn.ACTIVATIONS``.
        bias: give ``up`` and ``down`` a bias.
        dropout_hidden: rate on the hidden vector, in [0, 1).
        dropout_output: rate on the block's output, in [0, 1).
        beta: Swish's beta (``activation="swish"`` only).
        learn_beta: make beta a parameter.

    Raises:
        ValueError: a size that is not positive, a rate outside [0, 1), an unknown activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "relu",
        bias: bool = False,
        dropout_hidden: float = 0.0,
        dropout_output: float = 0.0,
        beta: float = 1.0,
        learn_beta: bool = False,
    ) -> None:
        super().__init__()
        _positive(d_model=d_model, d_ff=d_ff)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.act = make_activation(activation, beta, learn_beta)
        self.drop_hidden = _dropout("dropout_hidden", dropout_hidden)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.drop_output = _dropout("dropout_output", dropout_output)

    def forward(self, x_D: Tensor) -> Tensor:
        """Map ``(..., d_model)`` to ``(..., d_model)``."""
        h_F = self.act(self.up(x_D))
        return self.drop_output(self.down(self.drop_hidden(h_F)))


class GatedFFN(nn.Module):
    """``down(act(gate(x)) * up(x))``, the GLU family of Shazeer 2020 (arXiv 2002.05202, eqs. 5 and 6).

    identity gives the bilinear block, sigmoid GLU, relu ReGLU, gelu GEGLU, silu SwiGLU. Three projections instead of
    two: at equal parameters ``d_ff`` is two thirds of a dense block's.

    Args and errors as for ``DenseFFN``; ``bias`` gives one to ``gate``, ``up`` and ``down``.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "silu",
        bias: bool = False,
        dropout_hidden: float = 0.0,
        dropout_output: float = 0.0,
        beta: float = 1.0,
        learn_beta: bool = False,
    ) -> None:
        super().__init__()
        _positive(d_model=d_model, d_ff=d_ff)
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.act = make_activation(activation, beta, learn_beta)
        self.drop_hidden = _dropout("dropout_hidden", dropout_hidden)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.drop_output = _dropout("dropout_output", dropout_output)

    def forward(self, x_D: Tensor) -> Tensor:
        """Map ``(..., d_model)`` to ``(..., d_model)``."""
        h_F = self.act(self.gate(x_D)) * self.up(x_D)
        return self.drop_output(self.down(self.drop_hidden(h_F)))
