"""What a check found: one line an item, then a verdict."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["pass", "fail", "n/a"]
MARKS: dict[Status, str] = {"pass": "ok  ", "fail": "FAIL", "n/a": "-   "}


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

    def line(self, width: int) -> str:
        """The printed line; a failure carries a second one that says what to do."""
        text = f"{MARKS[self.status]}  {self.name:<{width}}  {self.measured}"
        return f"{text}\n      {'':<{width}}  -> {self.fix}" if self.status == "fail" and self.fix else text


@dataclass(frozen=True)
class Report:
    """The whole checklist of one block at one size."""

    block: str
    d_model: int
    d_ff: int
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True when no item failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the items that failed."""
        return [outcome.name for outcome in self.outcomes if outcome.status == "fail"]

    def text(self) -> str:
        """The checklist for people."""
        width = max(len(outcome.name) for outcome in self.outcomes)
        head = f"{self.block}: d_model {self.d_model}, d_ff {self.d_ff}"
        lines = [outcome.line(width) for outcome in self.outcomes]
        checked = sum(outcome.status != "n/a" for outcome in self.outcomes)
        if self.passed:
            verdict = f"{self.block} keeps the contract: {checked} of {checked} items pass ({self.seconds:.1f} s)."
        else:
            verdict = (
                f"{self.block} breaks the contract: {len(self.failed)} of {checked} items fail "
                f"({', '.join(self.failed)})."
            )
        return "\n".join([head, *lines, verdict])

    def json(self) -> str:
        """The checklist for machines."""
        return json.dumps(
            {
                "block": self.block,
                "passed": self.passed,
                "failed": self.failed,
                "d_model": self.d_model,
                "d_ff": self.d_ff,
                "seconds": round(self.seconds, 3),
                "items": [asdict(outcome) for outcome in self.outcomes],
            },
            indent=2,
        )
