"""Which of a block's parameters is ``gate``, which ``up``, which ``down``: every way its matrices can be read.

Names are believed first. Then any assignment that the shapes allow is a reading: matrices of equal shape exchanged,
kept transposed, or two packed in one.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffnlab.contract.subject import Subject

ROLES = ("gate", "up", "down")
WHOLE = slice(None)


@dataclass(frozen=True)
class Part:
    """A parameter, or one of the two matrices packed in it.

    Attributes:
        name: of the parameter, in full.
        rows: those of the matrix, once it lies as ``nn.Linear`` keeps it.
        cut: what ``rows`` are called.
        turned: the parameter is kept transposed.
        inward: maps ``d_model`` to ``d_ff``; otherwise the other way.
        linear: belongs to an ``nn.Linear``, which is not transposed by its author's choice.
    """

    name: str
    rows: slice
    cut: str
    turned: bool
    inward: bool
    linear: bool

    @property
    def label(self) -> str:
        """The name without ``.weight``, for people."""
        return self.name.removesuffix(".weight")

    @property
    def role(self) -> str | None:
        """The role that the name declares, where it declares one alone: ``gate_proj`` does, ``gate_up`` does not."""
        named = [role for role in ROLES if role in self.label.replace("_", ".").split(".")]
        return named[0] if len(named) == 1 else None

    def take(self, parameter: Tensor) -> Tensor:
        """This part's matrix, or of a vector its entries."""
        return (parameter.T if self.turned and parameter.ndim == 2 else parameter)[self.rows]


@dataclass(frozen=True)
class Reading:
    """One assignment of parameters to roles; ``biases`` holds those roles that have one."""

    parts: Mapping[str, Part]
    biases: Mapping[str, tuple[str, slice]]

    @property
    def strays(self) -> int:
        """In how many places this goes against what names and ``nn.Linear`` say."""
        return sum(part.role not in (None, role) for role, part in self.parts.items()) + len(self._turned())

    def _turned(self) -> list[str]:
        # Only a square matrix can be turned against its nn.Linear: of any other the shape would say so
        return [p.label for p in self.parts.values() if p.turned and p.linear and p.role is not None]

    def weights(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``gate.weight`` and so on, out of the block's own parameters, or out of their gradients."""
        found = {f"{role}.weight": part.take(values[part.name]) for role, part in self.parts.items()}
        return found | {f"{role}.bias": values[name][rows] for role, (name, rows) in self.biases.items()}

    def condition(self) -> str:
        """What would have to be so for this reading to be the right one; empty where nothing speaks against it."""
        moved = {role: part.role for role, part in self.parts.items() if part.role not in (None, role)}
        said = []
        if moved and set(moved) == set(moved.values()):
            said.append(f"your {' and '.join(moved)} are swapped")
        elif moved:
            said.append(", ".join(f"{role} = {part.label}" for role, part in self.parts.items() if part.role != role))
        said += [f"your {label} is transposed" for label in self._turned()]
        return " and ".join(said)

    def layout(self) -> str:
        """Where the names do not say it: what was taken for what."""
        return ", ".join(
            f"{role} = {part.cut}{part.label}{' transposed' if part.turned else ''}"
            for role, part in self.parts.items()
            if part.role != role or part.turned
        )


@dataclass(frozen=True)
class Weights:
    """A block's parameters, sorted: matrices, vectors that may be biases, and what is neither."""

    matrices: dict[str, Tensor]
    biases: dict[str, Tensor]
    others: dict[str, Tensor]
    linear: frozenset[str]

    @classmethod
    def of(cls, block: nn.Module) -> "Weights":
        """Sort, and move what a constructor leaves at zero or at one, so that its effect shows."""
        generator = torch.Generator().manual_seed(11)
        matrices: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, parameter in block.named_parameters():
            if parameter.ndim == 2:
                matrices[name] = parameter
                continue
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 and (name.endswith("bias") or not parameter.any()):
                biases[name] = parameter
                change = parameter + (0.0 if parameter.any() else noise - 0.5)
            else:
                others[name] = parameter
                change = parameter * (1 + noise / 2)
            with torch.no_grad():
                parameter.copy_(change)
        linear = {f"{path}.weight" for path, module in block.named_modules() if isinstance(module, nn.Linear)}
        return cls(matrices, biases, others, frozenset(linear))

    def readings(self, roles: tuple[str, ...], subject: Subject) -> list[Reading]:
        """Every reading that the shapes allow, those that go with the names first."""
        deals = [self._deals(name, p.shape, subject) for name, p in self.matrices.items()]
        found = []
        for deal in itertools.product(*deals):
            parts = [part for dealt in deal for part in dealt]
            if len(parts) != len(roles):
                continue
            for order in itertools.permutations(parts):
                if all(part.inward == (role != "down") for role, part in zip(roles, order, strict=True)):
                    taken = dict(zip(roles, order, strict=True))
                    found += [Reading(taken, biases) for biases in self._biases(taken, subject)]
        return sorted(found, key=lambda reading: reading.strays)

    def _deals(self, name: str, shape: torch.Size, subject: Subject) -> list[tuple[Part, ...]]:
        """What one matrix may hold: a part, or two."""
        d, f = subject.d_model, subject.d_ff
        deals: list[tuple[Part, ...]] = []
        for turned in (False, True):
            size = (shape[1], shape[0]) if turned else (shape[0], shape[1])

            def part(
                rows: slice = WHOLE, cut: str = "", *, inward: bool = True, turned: bool = turned, name: str = name
            ) -> Part:
                return Part(name, rows, cut, turned, inward, name in self.linear)

            if size == (f, d):
                deals.append((part(),))
            if size == (d, f):
                deals.append((part(inward=False),))
            if size == (2 * f, d):
                deals.append((part(slice(0, f), "first half of "), part(slice(f, None), "second half of ")))
                deals.append((part(slice(0, None, 2), "even rows of "), part(slice(1, None, 2), "odd rows of ")))
        return deals

    def _biases(self, parts: Mapping[str, Part], subject: Subject) -> Iterator[dict[str, tuple[str, slice]]]:
        """A projection's own bias goes with it; bare vectors go wherever their length allows."""
        own: dict[str, tuple[str, slice]] = {}
        for role, part in parts.items():
            name = f"{part.label}.bias"
            if part.name.endswith(".weight") and name in self.biases:
                own[role] = (name, part.rows)
        bare = [name for name in self.biases if name not in {name for name, _ in own.values()}]
        free = [role for role in parts if role not in own]
        for roles in itertools.permutations(free, len(bare)):
            given = own | {role: (name, WHOLE) for role, name in zip(roles, bare, strict=True)}
            lengths = {role: subject.d_model if role == "down" else subject.d_ff for role in given}
            if all(len(self.biases[name][rows]) == lengths[role] for role, (name, rows) in given.items()):
                yield given
