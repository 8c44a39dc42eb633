"""Where a study's numbers come from: the commands that make it again, revision, data, code, devices."""

import contextlib
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

from ffnlab.call import override
from ffnlab.study import words
from ffnlab.study.answer import Analysis
from ffnlab.study.load import Study

if TYPE_CHECKING:
    import pandas as pd

# Settings of a study that it keeps whatever a later command leaves out, and those that only said how to go on.
DECLARED = re.compile(r"^[+~]*(analysis|baseline)=")
GOING_ON = re.compile(r"^[+~]*(retry|stale)=")


def provenance(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """What produced the numbers, a line each where there are several."""
    study = analysis.study
    cells = study.cells

    revisions = _values(cells, "revision")
    if cells["dirty"].any():
        revisions[-1] += " with uncommitted changes" if len(revisions) == 1 else "; with uncommitted changes"
    said = "declared in study.json before the runs" if study.declared else "not declared before the runs"
    return [
        ("Command", [words.plain(command) for command in commands(study)] or ["not recorded"]),
        ("Revision", revisions),
        ("Data hash", _values(cells, "hash_data")),
        ("Code fingerprint", _values(cells, "code")),
        *_package(cells),
        ("Device", _values(cells, "device")),
        ("Primary analysis", [f"{words.primary_name(study.analysis)}, {said}"]),
    ]


def _values(cells: "pd.DataFrame", column: str) -> list[str]:
    """What the runs have in ``column``; where they differ a line a value, with the blocks or the runs that have it."""
    known = cells[cells[column] != ""]
    values = sorted(known[column].unique())
    if len(values) < 2:
        return [words.plain(value) for value in values] or ["not recorded"]
    said = []
    mixed = known.groupby("block")[column].nunique().gt(1).any()
    for value in values:
        own = known[known[column] == value]
        whose = f"{len(own)} of {len(cells)} runs" if mixed else ", ".join(dict.fromkeys(own["block"]))
        said.append(words.plain(f"{value}: {whose}"))
    return said


def _package(cells: "pd.DataFrame") -> list[tuple[str, list[str]]]:
    """Several fingerprints are no change of code where the package is one: a block of one's own adds its own file."""
    package = set(cells["package_code"])
    if cells["code"].nunique() < 2 or len(package) > 1 or "" in package:
        return []
    return [("Package", ["the same in all runs; a block of one's own adds its file to the fingerprint"])]


def commands(study: Study) -> list[str]:
    """What to type, one after the other, for the same study in an empty folder.

    A study can be declared by one command and extended by others, and any of them may have set its baseline: each is
    given what was declared in the end, as a new study would refuse to change it after its first results.
    """
    if not study.declared:
        return list(dict.fromkeys(str(command) for command in study.cells["command"] if command))
    manifest: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a damaged record is said elsewhere
        manifest = dict(json.loads((study.path / "study.json").read_text(encoding="utf-8")).items())
    listed = manifest.get("commands")
    typed = [str(command) for command in listed] if isinstance(listed, list) else []
    blocks = list(dict.fromkeys(study.cells["block"]))
    usual = {"analysis": "unpaired", "baseline": "gelu" if "gelu" in blocks else blocks[0]}
    declared = {key: str(manifest.get(key) or value) for key, value in usual.items()}
    told = [_as_declared(command, declared, usual) for command in typed or [study.command] if command]
    return list(dict.fromkeys(told))


def _as_declared(command: str, declared: dict[str, str], usual: dict[str, str]) -> str:
    try:
        parts = shlex.split(command)
    except ValueError:  # not ours
        return command
    kept = [part for part in parts if not GOING_ON.match(part)]
    given = usual | {
        part.partition("=")[0].lstrip("+~"): part.partition("=")[2] for part in kept if DECLARED.match(part)
    }
    if given != declared:
        kept = [part for part in kept if not DECLARED.match(part)]
        kept += [override(key, value) for key, value in declared.items() if value != usual[key]]
    return command if kept == parts else shlex.join(kept)
