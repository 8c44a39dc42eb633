"""Does a block compute what one of ours does? Same weights, same inputs, outputs and gradients compared in float64.

The yardstick is this project's own block, whose parity with other libraries is tested (``tests/parity``).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call

from ffnlab.call import CONF
from ffnlab.contract.behaviour import EXACT
from ffnlab.contract.readings import Reading, Weights
from ffnlab.contract.report import Finding
from ffnlab.contract.subject import Subject, gap
from ffnlab.errors import UserError
from ffnlab.ffn import ACTIVATIONS, DenseFFN, GatedFFN, locate
from ffnlab.schema import nearest

SCALES = (1.0, 4.0, 16.0)  # of the inputs, each judged by itself: where an activation bends, and far out
CAST = 2e-6  # relative: float32's rounding; two activations of the field differ by more
QUICK_GELU = 1.702  # x * sigmoid(1.702 x), as in CLIP


@functools.cache
def references() -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """Our blocks by name, ``conf/ffn``: class and options."""
    found = {}
    for path in sorted((CONF / "ffn").glob("*.yaml")):
        options = yaml.safe_load(path.read_text())
        options.pop("down_init", None)  # read by the initialisation, no option of the class
        found[path.stem] = (locate(options.pop("_target_")), options)
    return found


def like(name: str) -> Callable[[Subject], Finding]:
    """The item that compares with our block ``name``.

    Raises:
        UserError: no block of ours is called so.
    """
    if name not in references():
        known = list(references())
        raise UserError(f"no block of ours is called '{name}'{nearest(name, known)}: {', '.join(known)}")
    return lambda subject: _Comparison(subject, name).finding()


@dataclass(frozen=True)
class _Formula:
    """One of ours, ready to be given somebody's weights."""

    name: str
    cls: type[nn.Module]
    options: Mapping[str, Any]

    @property
    def roles(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if issubclass(self.cls, GatedFFN) else ("up", "down")


class _Comparison:
    """The block on trial with known weights, and what it makes of random tokens in eval mode."""

    def __init__(self, subject: Subject, name: str) -> None:
        self.subject, self.name = subject, name
        self.block = subject.quiet().eval()
        self.weights = Weights.of(self.block)
        self.inputs = [scale * subject.tokens(64, seed=21 + i) for i, scale in enumerate(SCALES)]
        with torch.no_grad():
            self.outputs = [self.block(x.clone()) for x in self.inputs]
        scalars = [value for value in self.weights.others.values() if value.numel() == 1]
        self.beta = scalars[0].detach().reshape(()) if len(scalars) == 1 else None
        self.target = self._formula(name, *references()[name])

    def _formula(self, name: str, cls: type[nn.Module], options: Mapping[str, Any]) -> _Formula:
        """Give ours the beta that the block was built with; no other option of the block's changes the formula."""
        if options.get("activation") != "swish":
            return _Formula(name, cls, options)
        asked = {key: value for key, value in self.subject.options.items() if key in ("beta", "learn_beta")}
        asked["learn_beta"] = self.beta is not None
        return _Formula(name, cls, {**options, **asked})

    def finding(self) -> Finding:
        """Equal, or not: by how much, and what it is instead."""
        readings = self._readings(self.target)
        if not readings:
            return self._fail(self._misfit() + "; " + self._computes(()))
        best = min(readings, key=lambda reading: (reading.strays, self._gap(self.target, reading)))
        difference = self._gap(self.target, best)
        if difference > EXACT:
            said = f"differs from {self.name} by {difference:.2g} of the largest output; "
            return self._fail(said + self._computes(tuple(readings)))
        if complaint := self._bias_complaint(best):
            return self._fail(f"equal but for the bias: {complaint}")
        where, worst = max(self._gradients(best).items(), key=lambda pair: pair[1])
        if worst > EXACT:
            return self._fail(f"output equal, but the gradient of {where} differs by {worst:.2g}")
        layout = best.layout()
        return Finding(
            True,
            f"equal: output and gradients differ by {max(difference, worst):.1e} (allowed {EXACT:.0e})"
            + (f", with {layout}" if layout else ""),
        )

    def _fail(self, measured: str) -> Finding:
        idle = [name for name, value in self.weights.others.items() if value.numel() > 1 or self.beta is None]
        if idle:
            measured += f"; it has {', '.join(idle)} as well"
        return Finding(False, measured, f"compare your forward with {self._source()}")

    def _source(self) -> str:
        gated = issubclass(self.target.cls, GatedFFN)
        activation = self.target.options.get("activation")
        inside = f"{activation}(gate(x)) * up(x)" if gated else f"{activation}(up(x))"
        return f"down({inside}); ffnlab/ffn/blocks.py has ours"

    # --- what can be compared

    def _readings(self, formula: _Formula) -> list[Reading]:
        return self.weights.readings(formula.roles, self.subject)

    def _misfit(self) -> str:
        names = [name.removesuffix(".weight") for name in self.weights.matrices]
        roles = self.target.roles
        if len(names) != len(roles):
            ours = f"{self.name} {len(roles)} ({', '.join(roles)})"
            return f"has {len(names)} matrices ({', '.join(names)}), {ours}"
        shapes = ", ".join(
            f"{name} {tuple(value.shape)}" for name, value in zip(names, self.weights.matrices.values(), strict=True)
        )
        return f"{shapes}: not the sizes of {self.name} with d_model {self.subject.d_model}, d_ff {self.subject.d_ff}"

    def _run(self, formula: _Formula, weights: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """What ours makes of ``inputs`` with the block's weights; a bias that the block has not is zero."""
        bias = any(name.endswith(".bias") for name in weights)
        ours = formula.cls(self.subject.d_model, self.subject.d_ff, **{**formula.options, "bias": bias})
        given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in ours.named_parameters()} | weights
        if formula.options.get("learn_beta") and self.beta is not None:
            given["act.beta"] = self.beta
        return [functional_call(ours.eval(), given, (x,)) for x in inputs]

    def _gap(self, formula: _Formula, reading: Reading, without: tuple[str, ...] = ()) -> float:
        """Largest difference of the outputs, with the biases of the roles ``without`` left out."""
        theirs = self._theirs(formula, reading, without)
        return max(gap(mine, ours) for mine, ours in zip(self.outputs, theirs, strict=True))

    def _theirs(self, formula: _Formula, reading: Reading, without: tuple[str, ...] = ()) -> list[Tensor]:
        weights = reading.weights(dict(self.block.named_parameters()))
        weights = {
            name: torch.zeros_like(value) if name.endswith(".bias") and name.split(".")[0] in without else value
            for name, value in weights.items()
        }
        with torch.no_grad():
            return self._run(formula, weights, self.inputs)

    def _gradients(self, reading: Reading) -> dict[str, float]:
        """By how much gradients differ: of the input, and of each weight and bias."""
        parameters = dict(self.block.named_parameters())
        worst: dict[str, float] = {}
        for i, x in enumerate(self.inputs):
            weight = self.subject.tokens(64, seed=31 + i)
            self.block.zero_grad()
            mine = x.clone().requires_grad_()
            (self.block(mine.clone()) * weight).sum().backward()
            of_mine = reading.weights(
                {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
            )
            of_mine["the input"] = torch.zeros_like(x) if mine.grad is None else mine.grad
            leaves = {n: w.detach().clone().requires_grad_() for n, w in reading.weights(parameters).items()}
            theirs = x.clone().requires_grad_()
            (self._run(self.target, leaves, [theirs])[0] * weight).sum().backward()
            for name, leaf in {**leaves, "the input": theirs}.items():
                assert leaf.grad is not None
                label = name.removesuffix(".weight")
                worst[label] = max(worst.get(label, 0.0), gap(of_mine[name], leaf.grad))
        return worst

    def _bias_complaint(self, reading: Reading) -> str:
        """Ours has a bias in every projection or in none."""
        having = [role for role in self.target.roles if role in reading.biases]
        lacking = [role for role in self.target.roles if role not in having]
        if having and lacking:
            return f"{', '.join(having)} have one, {', '.join(lacking)} has none"
        if not having and self.subject.options.get("bias") is True:
            return "bias=true, and no projection has one"
        return ""

    # --- what it is instead

    def _computes(self, readings: tuple[Reading, ...]) -> str:
        """The first explanation that holds to rounding, the simplest first."""
        for reading in readings:
            if reading.strays and self._gap(self.target, reading) <= EXACT:
                return f"equal if {reading.condition()}"
        for reading in readings:
            for role in reading.biases:
                if self._gap(self.target, reading, (role,)) <= EXACT:
                    return f"equal if the bias of {role} is left out"
        if readings and min(self._gap(self.target, reading) for reading in readings) < CAST:
            return "that is float32's rounding: is something cast to float32 inside?"
        tried = [(formula, reading) for formula in self._formulas() for reading in self._readings(formula)]
        for explain in (_equal, _multiple, _plus_input):
            for formula, reading in tried:
                said = explain(formula.name, self.outputs, self._theirs(formula, reading), self.inputs)
                if said:
                    condition = reading.condition()
                    return f"it computes {said}" + (f" if {condition}" if condition else "")
        return "none of our formulas fits"

    def _formulas(self) -> Iterator[_Formula]:
        """The named ones, the one asked for before the others; then both classes with every activation there is."""
        yield self.target
        named = set()
        for name, (cls, options) in references().items():
            named.add((cls, options.get("activation")))
            yield _Formula(name, cls, options)
        betas = {float(self.subject.options.get("beta", QUICK_GELU)), QUICK_GELU}
        for cls, kind in ((DenseFFN, "dense"), (GatedFFN, "gated")):
            for activation in ACTIVATIONS:
                label = f"the {kind} block with {activation}"
                if activation == "swish":
                    for beta in sorted(betas):
                        yield _Formula(f"{label}, beta {beta:g}", cls, {"activation": activation, "beta": beta})
                    if self.beta is not None:
                        yield _Formula(f"{label}, learned beta", cls, {"activation": activation, "learn_beta": True})
                elif (cls, activation) not in named:
                    yield _Formula(label, cls, {"activation": activation})


def _equal(name: str, mine: list[Tensor], ours: list[Tensor], _inputs: list[Tensor]) -> str:
    return name if max(map(gap, mine, ours)) <= EXACT else ""


def _multiple(name: str, mine: list[Tensor], ours: list[Tensor], inputs: list[Tensor]) -> str:
    size = ours[0].square().sum()
    factor = ((mine[0] * ours[0]).sum() / size).item() if size else 0.0
    if factor == 0.0:
        return ""
    return f"{factor:.4g} times {name}" if _equal(name, mine, [factor * y for y in ours], inputs) else ""


def _plus_input(name: str, mine: list[Tensor], ours: list[Tensor], inputs: list[Tensor]) -> str:
    less = [y - x for y, x in zip(mine, inputs, strict=True)]
    return f"{name} plus its input" if _equal(name, less, ours, inputs) else ""
