"""Broken blocks, each broken in one way, with the items of the check that must fail for it and no others.

``FAULTS`` maps a class to (options to build it with, items that fail).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ffnlab.ffn import DenseFFN, GatedFFN

FAULTS: dict[type, tuple[dict[str, Any], set[str]]] = {}


def fails(*items: str, **options: Any):
    def register(cls: type) -> type:
        FAULTS[cls] = (options, set(items))
        return cls

    return register


class Dense(nn.Module):
    """A right block, as a student would write it; faults below change one thing."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """A right gated block without a submodule ``act``."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# --- construction and shape


@fails("builds")
class BuildsNothing:
    def __init__(self, d_model: int, d_ff: int) -> None:
        raise ZeroDivisionError("the author was called away")


@fails("shapes")
class OnlyBatches(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.ndim > 1 else x.unsqueeze(0))


@fails("dtype and device")
class ForgetsToCastBack(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.promote_types(x.dtype, torch.float32))


@fails("meta device")
class NamesADevice(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.register_buffer("scale", torch.ones(d_ff, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale)


@fails("meta device")
class ConstantLostOnMeta(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.register_buffer("beta", torch.tensor(1.7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x) * self.beta))


# --- tokens


@fails("token independence")
class MixesNeighbours(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * x.roll(1, dims=-2) if x.ndim > 1 else x)


@fails("token independence", "pure")
class BatchStatistics(Dense):
    """BatchNorm: tokens meet in train mode, and running statistics are state."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.norm = nn.BatchNorm1d(d_ff)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(self.norm(h.reshape(-1, h.shape[-1])).view_as(h)))


# --- nonlinearity and the last projection


@fails("nonlinear", "nonlinear before down")
class NoActivation(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@fails("nonlinear before down", "down is last")
class ActivationAfterDown(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.down(self.up(x)))


@fails("formula", activation="silu")
class OtherActivation(DenseFFN):
    """Says SiLU, computes GELU."""

    def __init__(self, d_model: int, d_ff: int, **options: Any) -> None:
        super().__init__(d_model, d_ff, **options)
        self.act = nn.GELU()


@fails("formula", activation="silu")
class GateLeftOpen(GatedFFN):
    """SwiGLU without its activation: still nonlinear, so only the formula tells."""

    def __init__(self, d_model: int, d_ff: int, **options: Any) -> None:
        super().__init__(d_model, d_ff, **options)
        self.act = nn.Identity()


@fails("gate side")
class SwappedInAUsersBlock(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * F.silu(self.up(x)))


@fails("gate side", "formula", "pre-activation", activation="silu")
class SwappedInSwiGLU(GatedFFN):
    def forward(self, x_D: Tensor) -> Tensor:
        return self.drop_output(self.down(self.drop_hidden(self.gate(x_D) * self.act(self.up(x_D)))))


@fails("gate side", "formula", "pre-activation", activation="relu")
class SwappedInReGLU(SwappedInSwiGLU):
    """ReLU is homogeneous for positive factors; the swap shows all the same."""


@fails("pre-activation")
class BypassesItsAct(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.act = nn.GELU()


@fails("down is last", activation="silu")  # what hooks on down cannot be measured, and is no failure of its own
class NeverCallsDown(GatedFFN):
    """Uses the weight of ``down`` behind the module's back: no hook, no census."""

    def forward(self, x_D: Tensor) -> Tensor:
        return F.linear(self.act(self.gate(x_D)) * self.up(x_D), self.down.weight, self.down.bias)


@fails("down is last", "zero down: output", "zero down: gradient")
class SkipsAroundDown(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.skip = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.skip(x)


# --- parameters


@fails("no sharing")
class GateIsUp(Gated):
    """One matrix under two names: bilinear in disguise, and a third fewer parameters."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.up.weight = self.gate.weight


@fails("no sharing")
class OneMatrixForAllLayers(Dense):
    kept: ClassVar[dict[tuple[int, int], nn.Parameter]] = {}

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        if self.up.weight.is_meta:
            return
        self.up.weight = self.kept.setdefault((d_model, d_ff), self.up.weight)


@fails("down is last", "parameter count")
class IgnoresDFF(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, 4 * d_model)


@fails("parameter count")
class RoundsUpInSecret(Dense):
    """Has a second matrix rounded up to a multiple of 256, as is common."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.wide = nn.Linear(d_model, -(-d_ff // 256) * 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) + self.wide(x).tanh().mean(-1, keepdim=True))


@fails("bias")
class KeepsItsBias(nn.Module):
    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@fails("bias")
class BiasWithoutEffect(nn.Module):
    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(F.linear(x, self.up.weight)))


# --- determinism and state


@fails("deterministic", "pure", "token independence", "numerical gradient", "compile", "meta device", "vmap", "dropout")
class AddsNoise(Dense):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h + 0.01 * torch.randn_like(h))


CALLS = 0


@fails("pure", "compile")
class CountsCalls(Dense):
    """A hidden global counter that changes nothing yet."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x)


STEP = 0


@fails(
    "deterministic",
    "pure",
    "token independence",
    "numerical gradient",
    "compile",
    "meta device",
    "vmap",
    "down is last",
    "dropout",
)
class WarmsUpInSecret(Dense):
    """A hidden global counter that scales the output."""

    def forward(self, x: Tensor) -> Tensor:
        global STEP
        STEP += 1
        return super().forward(x) * (1 + 0.5 ** (STEP % 7))


@fails("pure", "compile")
class CountsOnItself(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@fails("pure")
class DamagesItsInput(Dense):
    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return super().forward(x)


# --- dropout


class WithDropout(nn.Module):
    """A right block with both places of dropout."""

    def __init__(self, d_model: int, d_ff: int, dropout_hidden: float = 0.0, dropout_output: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.rates = (dropout_hidden, dropout_output)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)), self.rates[0])), self.rates[1])


@fails("dropout")
class DropsInEval(WithDropout):
    """At rate zero all is well; the item turns the rate up."""

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate, training=True)


@fails("dropout", "deterministic", dropout_hidden=0.1)
class DropsInEvalAtItsRate(DropsInEval):
    """With a rate configured, repeats in eval mode differ as well."""


@fails("dropout")
class DropsWithoutRescaling(WithDropout):
    def drop(self, x: Tensor, rate: float) -> Tensor:
        return x * (torch.rand_like(x) >= rate) if self.training and rate else x


@fails("dropout")
class DropsInTheOtherPlace(WithDropout):
    def __init__(self, d_model: int, d_ff: int, dropout_hidden: float = 0.0, dropout_output: float = 0.0) -> None:
        super().__init__(d_model, d_ff, dropout_output, dropout_hidden)


@fails("dropout")
class KeepsInsteadOfDrops(WithDropout):
    """Takes the rate for the probability of keeping."""

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, 1 - rate, self.training) if rate else x


@fails("dropout")
class OneMaskForAllTokens(WithDropout):
    def drop(self, x: Tensor, rate: float) -> Tensor:
        return x * F.dropout(torch.ones_like(x[..., :1, :]), rate, self.training) if rate else x


@fails("dropout")
class NeverDrops(WithDropout):
    def drop(self, x: Tensor, rate: float) -> Tensor:
        return x


@fails("dropout")
class OwnDropoutBeforeTheActivation(Dense):
    """Has no option of ours, only an ``nn.Dropout``, where it shifts the mean."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.dropout(self.up(x))))


# --- gradients


@fails("gradient flow", "numerical gradient", "zero down: gradient")
class DetachesABranch(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x).detach()) * self.up(x))


@fails("numerical gradient")
class DetachesItsInput(Gated):
    """All parameters learn, but the layers below lose a part of their gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x.detach())) * self.up(x))


@fails("gradient flow", "numerical gradient", "zero down: gradient")
class HasAnIdleParameter(Dense):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_ff)
        self.idle = nn.Linear(d_model, d_ff, bias=False)


@fails("numerical gradient", "zero down: gradient")
class SmugglesAGradient(Dense):
    """Adds zero, with a gradient: the value is right, learning is not."""

    def forward(self, x: Tensor) -> Tensor:
        side = self.up(x).sum(-1, keepdim=True)
        return super().forward(x) + (side - side.detach())


@fails("zero down: output", "zero down: gradient", "down is last")
class NormalisesDown(Dense):
    """Divides by the norm of ``down``: not a number where the ablation starts it at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.down.weight.norm()


# --- compile, vmap, half precision


@fails("compile", "vmap", "meta device")
class BranchesOnValues(Dense):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h) if h.sum() > -1e9 else h)


@fails("compile")
class TakesAShortcutWhenCompiled(Dense):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h, approximate="tanh" if torch.compiler.is_compiling() else "none"))


@fails("vmap")
class WritesIntoAFreshBuffer(Dense):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(*x.shape[:-1], self.up.out_features, dtype=x.dtype, device=x.device)
        hidden.copy_(F.gelu(self.up(x)))
        return self.down(hidden)


@fails("half precision")
class OverflowsInHalf(Dense):
    """Right in float32; the square of a thousandfold is no float16."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(1000 * self.up(x)).square() / 1e6)
