"""What may be compared, and what a reader has to be told before they read a number.

Hashes that differ inside one comparison are refused. Everything else that is not as it should be is a `Problem`, shown
in red at the top of the report: nothing is dropped in silence.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ffnlab.errors import UserError
from ffnlab.study.load import Study

if TYPE_CHECKING:
    import pandas as pd

# Kinds of problems that make every verdict one about a start of training.
START = ("unlearned", "warmup")
LEARNED = 0.05  # nats below a unigram model's loss from which on something was learned from context


@dataclass(frozen=True)
class Problem:
    """``kind`` is a word to filter by, ``text`` one sentence, ``cells`` what it is about."""

    kind: str
    text: str
    cells: tuple[str, ...] = ()


def refuse_unequal(study: Study) -> None:
    """Stop where cells that would be compared were not given the same data, batches or shared initial weights.

    Cells whose settings differ in more than the FFN and the optimiser (another d_model, say) may well have other shared
    weights; `problems` says so. Their data must be the same all the same.

    Raises:
        UserError: names two cells and what differs.
    """
    _refuse(study, "hash_data", [], "data")
    _refuse(study, "hash_batches", ["data_seed", "conditions"], "batches at the same data seed")
    _refuse(study, "hash_shared_init", ["init_seed", "conditions"], "shared initial weights at the same init seed")


def which_folder(path: Path) -> str:
    """What to give instead of a folder that is no study."""
    inside = sorted(record.parent for record in path.glob("*/study.json"))
    example = str(inside[0]) if inside else "outputs/NAME"
    more = "" if inside else " (study=NAME puts runs into one; single runs to compare need a folder of their own)"
    return f"Give the folder of one study, as in {example}{more}."


def _refuse(study: Study, column: str, by: list[str], what: str) -> None:
    known = study.cells[study.cells[column] != ""]
    for _, group in known.groupby(by) if by else [((), known)]:
        if group[column].nunique() > 1:
            first = group.iloc[0]
            other = group[group[column] != first[column]].iloc[0]
            if not study.declared:
                raise UserError(
                    f"{study.path} is no study: it has no study.json, and {first['cell']} and {other['cell']} had "
                    f"different {what}, so its runs cannot be compared. {which_folder(study.path)}"
                )
            raise UserError(
                f"{first['cell']} and {other['cell']} had different {what} "
                f"({first[column][:12]} and {other[column][:12]}), so they cannot be compared. "
                "Run the older of them again, or put them into separate studies."
            )


def problems(study: Study, compared: "pd.DataFrame | None" = None) -> list[Problem]:
    """Everything to be said in red, gravest first; ``compared`` are the cells that enter the comparison, if not all."""
    cells, found = study.cells, []

    def report(kind: str, mask: "pd.Series[bool]", text: str) -> None:
        names = tuple(sorted(cells.loc[mask, "cell"]))
        if names:
            found.append(Problem(kind, f"{text}: {len(names)} of {len(cells)} cells ({_list(names)}).", names))

    status = cells["status"]
    if cells[status == "finished"].empty:
        found.append(Problem("empty", "No cell has finished: there is nothing to conclude from yet."))
    found.extend(_unlearned(cells if compared is None else compared))
    report("diverged", status == "diverged", "Diverged, without a loss, counted and not averaged")
    report("failed", status == "failed", "Failed")
    report("missing", status == "missing", "Not run yet")
    report("unfinished", ~status.isin(["diverged", "failed", "missing", "finished"]), "Not finished")
    report("stale", cells["stale"] | _other_code(cells), "Stale, run before the code or the data changed")
    arms = sorted(cells.loc[cells["matched"].eq(False), "arm"].unique())
    if arms:
        found.append(
            Problem(
                "unmatched", f"The budget is not matched for {_list(arms)}: this is no comparison at equal budgets."
            )
        )
    if cells["budget"].replace("", None).nunique() > 1:
        found.append(
            Problem("unmatched", f"Budgets of different kinds are mixed: {_list(sorted(set(cells['budget']) - {''}))}.")
        )
    found.extend(_design(study))
    dirty = cells["dirty"].astype(bool)
    report("dirty", dirty, "Run from a working tree with uncommitted changes")
    return found


def _unlearned(cells: "pd.DataFrame") -> list[Problem]:
    """One problem that names the arms whose mean loss is hardly below a unigram model's, or above it."""
    arms = cells[cells["status"] == "finished"].groupby("arm", sort=False).agg({"loss": "mean", "unigram": "max"})
    idle = arms[arms["loss"] > arms["unigram"] - LEARNED]  # an unknown unigram loss is nothing to be held against
    if idle.empty:
        return []
    bar = f"more than {LEARNED} below what the frequencies of single tokens give (unigram: {idle['unigram'].max():.4f})"
    if len(idle) == len(arms):
        said = f"No block learned from context: no mean loss is {bar}."
    else:
        whose = ", ".join(f"{arm} ({loss:.4f})" for arm, loss in idle["loss"].items())
        said = f"Not learned from context: {whose}. A mean loss should be {bar}."
    more = " Verdicts are of a start of training: train longer, or check the learning rate and its warm-up."
    return [Problem("unlearned", said + more)]


def _other_code(cells: "pd.DataFrame") -> "pd.Series[bool]":
    """Cells whose package is not that of most cells, or whose code is not that of most cells of their block.

    A block of the user's own has its file in its code, so blocks differ in it by right.
    """
    odd = _odd(cells["package_code"])
    for _, rows in cells.groupby("block"):
        odd.loc[rows.index] |= _odd(rows["code"])
    return odd


def _odd(values: "pd.Series[str]") -> "pd.Series[bool]":
    """Which of the known values are not the commonest."""
    known = values[values != ""]
    return (values != "") & (values != known.mode().iloc[0]) if len(known) else values.ne(values)


def _design(study: Study) -> list[Problem]:
    """Differences between arms beyond the FFN, and seeds that not every arm has."""
    cells, found = study.cells, []
    keys = sorted({key for row in cells["conditions"] for key, _ in row})
    differing = [
        key
        for key in keys
        if cells["conditions"].map(lambda row, key=key: dict(row).get(key)).nunique(dropna=False) > 1
    ]
    if differing:
        found.append(
            Problem(
                "confounded",
                f"Arms differ in more than the FFN: {_list(differing)}. Verdicts are about all of it together.",
            )
        )
    known = cells[cells["hash_shared_init"] != ""]
    if known.groupby("init_seed")["hash_shared_init"].nunique().gt(1).any():
        found.append(
            Problem(
                "shared_init",
                "Arms with the same seed do not share all other initial weights: pairing by seed is by batches only.",
            )
        )
    for column, what in (("steps", "steps"), ("tokens", "tokens")):
        if cells.loc[cells["status"] == "finished", column].nunique() > 1:
            found.append(Problem("unequal", f"Finished cells were not all trained for the same number of {what}."))
    if (devices := cells.loc[cells["device"] != "", "device"]).nunique() > 1:
        found.append(
            Problem(
                "hardware",
                f"Cells ran on different devices ({_list(sorted(devices.unique()))}): do not compare their speed.",
            )
        )
    if study.kind == "blocks":
        seeds = {str(arm): tuple(sorted(group["seed"])) for arm, group in cells.groupby("arm")}
        if len(set(seeds.values())) > 1:
            text = "; ".join(f"{arm} has {', '.join(map(str, s))}" for arm, s in seeds.items())
            found.append(Problem("seeds", f"Arms do not have the same seeds: {text}."))
    if not study.declared:
        found.append(
            Problem(
                "undeclared",
                "This folder is no study (it has no study.json) but runs side by side: neither baseline nor analysis "
                f"was declared before them. {which_folder(study.path)}",
            )
        )
    if study.baseline != study.declared_baseline:
        text = (
            f"The baseline {study.baseline} was chosen for this report; the study declared {study.declared_baseline}."
        )
        found.append(Problem("undeclared", text))
    return found


def _list(names: "tuple[str, ...] | list[str]", most: int = 8) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
