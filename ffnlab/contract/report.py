"""What a check found: one line an item, then a verdict."""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["pass", "fail", "n/a", "not measured"]
MARKS: dict[Status, str] = {"pass": "ok  ", "fail": "FAIL", "n/a": "-   ", "not measured": "?   "}
NOT_CHECKED = "The formula itself was NOT checked: add --like NAME (swiglu, gelu, ...)."


@dataclass(frozen=True)
class Finding:
    """What an item's function returns.

    Attributes:
        passed: None where the item does not apply to this block.
        measured: the figure, with its unit or its bound.
        fix: what is wrong and what to do; shown only on failure.
    """

    passed: bool | None
    measured: str
    fix: str = ""


@dataclass(frozen=True)
class Outcome:
    """One line of the checklist."""

    name: str
    status: Status
    measured: str
    fix: str = ""

    def line(self, width: int, columns: int | None = None) -> str:
        """The printed line; a failure carries a second one that says what to do. Both are cut to ``columns``."""
        margin = " " * (len(MARKS[self.status]) + 2 + width + 2)
        text = _fold(f"{MARKS[self.status]}  {self.name:<{width}}  ", self.measured, margin, columns)
        if self.status == "fail" and self.fix:
            text += "\n" + _fold(f"{margin}-> ", self.fix, f"{margin}   ", columns)
        return text


def _fold(start: str, text: str, margin: str, columns: int | None) -> str:
    """``start`` and ``text``, gone on with below ``text`` where the line would be longer than ``columns``."""
    if columns is None or len(start) + len(text) <= columns:
        return start + text
    room = max(columns - len(margin), 20)
    return start + f"\n{margin}".join(textwrap.wrap(text, room, break_on_hyphens=False))


@dataclass(frozen=True)
class Report:
    """The whole checklist of one block at one size; ``like`` names the block of ours it was compared with, if any."""

    block: str
    d_model: int
    d_ff: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    like: str | None = None

    @property
    def passed(self) -> bool:
        """True when no item failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the items that failed."""
        return [outcome.name for outcome in self.outcomes if outcome.status == "fail"]

    @property
    def formula_checked(self) -> bool:
        """Whether anything was measured about what the block computes beyond the contract."""
        items = ("formula", f"like {self.like}")
        return any(outcome.name in items and outcome.status in ("pass", "fail") for outcome in self.outcomes)

    def text(self, columns: int | None = None) -> str:
        """The checklist for people, with no line longer than ``columns`` where that is given."""
        width = max(len(outcome.name) for outcome in self.outcomes)
        head = f"{self.block}: d_model {self.d_model}, d_ff {self.d_ff}"
        lines = [outcome.line(width, columns) for outcome in self.outcomes]
        closing = [self._verdict()]
        if self.like is not None:
            closing.append(
                f"The formula was compared with this project's {self.like}, "
                "whose parity with other libraries is tested (tests/parity)."
            )
        elif not self.formula_checked:
            closing.append(NOT_CHECKED)
        return "\n".join([head, *lines, *(_fold("", line, "", columns) for line in closing)])

    def _verdict(self) -> str:
        checked = sum(outcome.status in ("pass", "fail") for outcome in self.outcomes)
        if self.passed:
            return f"{self.block} keeps the contract: {checked} of {checked} items pass ({self.seconds:.1f} s)."
        what = "breaks the contract"
        if self.failed == [f"like {self.like}"]:
            what = f"keeps the contract, but is not {self.like}"
        unmeasured = sum(outcome.status == "not measured" for outcome in self.outcomes)
        rest = f"; {unmeasured} not measured" if unmeasured else ""
        return f"{self.block} {what}: {len(self.failed)} of {checked} items fail ({', '.join(self.failed)}){rest}."

    def json(self) -> str:
        """The checklist for machines."""
        return json.dumps(
            {
                "block": self.block,
                "passed": self.passed,
                "failed": self.failed,
                "formula_checked": self.formula_checked,
                "like": self.like,
                "d_model": self.d_model,
                "d_ff": self.d_ff,
                "seconds": round(self.seconds, 3),
                "items": [asdict(outcome) for outcome in self.outcomes],
            },
            indent=2,
        )
