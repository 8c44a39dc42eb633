"""``study.json``: what belongs to a study and how each cell stands. Several processes write it, one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from ffnlab import records
from ffnlab.config import StudyConfig
from ffnlab.errors import UserError
from ffnlab.study.cells import LOCKS, Cell
from ffnlab.training.ledger import dumps, now, write_atomically

NAME = records.STUDY


def read(study_dir: Path) -> dict[str, Any]:
    """The manifest; empty where there is none yet. A damaged entry is empty: ``declare`` fills it again.

    Raises:
        UserError: it is damaged as a whole.
    """
    return records.read_study(study_dir / NAME)[0] if (study_dir / NAME).exists() else {}


def entries(study_dir: Path) -> dict[str, dict[str, Any]]:
    """The cells of the manifest by name."""
    return dict(read(study_dir).get("cells") or {})


def change(study_dir: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Read, edit and write the manifest under its lock."""
    (study_dir / LOCKS).mkdir(parents=True, exist_ok=True)
    with FileLock(study_dir / LOCKS / "study.lock"):
        manifest = read(study_dir)
        edit(manifest)
        write_atomically(study_dir / NAME, dumps(manifest, indent=2) + "\n")


def update_cell(study_dir: Path, name: str, **fields: Any) -> None:
    """Change fields of one cell's entry."""
    change(study_dir, lambda manifest: manifest["cells"][name].update(fields))


def check_declared(study_dir: Path, settings: StudyConfig, cells: list[Cell]) -> None:
    """What a study compares, and how, is declared before it runs.

    Raises:
        UserError: a baseline that is no block of the study; another analysis or baseline than declared, once a cell has
            a result.
    """
    manifest = read(study_dir)
    known = manifest.get("cells") or {}
    if settings.baseline is not None:
        blocks = sorted({cell.cfg.ffn.name for cell in cells} | {str(entry.get("block")) for entry in known.values()})
        if settings.baseline.partition(" ")[0] not in blocks:
            raise UserError(f"baseline={settings.baseline} is no block of the study; it has {', '.join(blocks)}")
    if not any(entry.get("result") for entry in known.values()):
        return
    for key in ("analysis", "baseline"):
        asked, declared = getattr(settings, key), manifest.get(key)
        if asked is not None and declared is not None and asked != declared:
            raise UserError(
                f"{study_dir} declared {key}={declared} before it ran, and has results: "
                f"leave out {key}={asked}, or start another study"
            )


def declare(
    study_dir: Path, settings: StudyConfig, command: str, cells: list[Cell], pending: list[str], stale: list[str]
) -> None:
    """Add cells to the manifest, and write the declarations of a new study.

    Args:
        study_dir: the study.
        settings: what the command says about it.
        command: as typed.
        cells: the command's cells.
        pending: names of those that are about to be run.
        stale: names of those that are kept although their code or data changed.
    """

    def edit(manifest: dict[str, Any]) -> None:
        known = manifest.setdefault("cells", {})
        manifest.setdefault("study", cells[0].cfg.study)
        manifest.setdefault("created", now())
        if command not in manifest.setdefault("commands", []):
            manifest["commands"].append(command)
        manifest["command"] = manifest["commands"][0]
        blocks = list(dict.fromkeys(cell.cfg.ffn.name for cell in cells))
        manifest["analysis"] = settings.analysis or manifest.get("analysis") or "unpaired"
        usual = "gelu" if "gelu" in blocks else blocks[0]
        manifest["baseline"] = settings.baseline or manifest.get("baseline") or usual
        if settings.kind:
            manifest["kind"] = settings.kind
        if settings.fresh_seeds is not None and "tuning_seeds" not in manifest:
            manifest["tuning_seeds"] = sorted({cell.cfg.seed for cell in cells})
        for cell in cells:
            seeds = {"seed": cell.cfg.seed, "init_seed": cell.cfg.init_seed, "data_seed": cell.cfg.data_seed}
            entry = {"block": cell.cfg.ffn.name, **seeds, "overrides": cell.overrides}
            fresh = {"status": "pending", "seconds": None, "result": None, "error": None}
            begun = fresh if cell.name in pending else {}
            known[cell.name] = {**fresh, **known.get(cell.name, {}), **begun, **entry, "stale": cell.name in stale}

    change(study_dir, edit)
