"""Does a block keep the FFN contract? Every item measures; none believes.

``check(MyBlock, {"activation": "silu"})`` returns a ``Report``; ``scripts/check_ffn.py`` prints it.
"""

from ffnlab.contract.check import ITEMS, check
from ffnlab.contract.report import Finding, Outcome, Report
from ffnlab.contract.subject import ContractError, Subject

__all__ = ["ITEMS", "ContractError", "Finding", "Outcome", "Report", "Subject", "check"]
