"""Where a study's numbers come from: the commands that make it again, revision, data, code, devices."""

import contextlib
import json
import re
import shlex
from typing import Any

from ffnlab.call import override
from ffnlab.study import words
from ffnlab.study.answer import Analysis
from ffnlab.study.load import Study

# Settings of a study that it keeps whatever a later command leaves out, and those that only said how to go on.
DECLARED = re.compile(r"^[+~]*(analysis|baseline)=")
GOING_ON = re.compile(r"^[+~]*(retry|stale)=")


def provenance(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """What produced the numbers, a line each where there are several."""
    study = analysis.study
    cells = study.cells

    def all_of(column: str) -> str:
        values = sorted({words.plain(value) for value in cells[column] if value})
        return ", ".join(values) or "not recorded"

    revision = all_of("revision") + (" with uncommitted changes" if cells["dirty"].any() else "")
    said = "declared in study.json before the runs" if study.declared else "not declared before the runs"
    return [
        ("Command", [words.plain(command) for command in commands(study)] or ["not recorded"]),
        ("Revision", [revision]),
        ("Data hash", [all_of("hash_data")]),
        ("Code fingerprint", [all_of("code")]),
        ("Device", [all_of("device")]),
        ("Primary analysis", [f"{words.primary_name(study.analysis)}, {said}"]),
    ]


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
