"""What may be compared, and what a reader has to be told before they read a number.

Hashes that differ inside one comparison are refused. Everything else that is not as it should be is a `Problem`, shown
in red at the top of the report: nothing is dropped in silence.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffnlab.errors import UserError
from ffnlab.study.load import Study

if TYPE_CHECKING:
    import pandas as pd

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
    _refuse(study.cells, "hash_data", [], "data")
    _refuse(study.cells, "hash_batches", ["data_seed", "conditions"], "batches at the same data seed")
    _refuse(
        study.cells, "hash_shared_init", ["init_seed", "conditions"], "shared initial weights at the same init seed"
    )


def _refuse(cells: "pd.DataFrame", column: str, by: list[str], what: str) -> None:
    known = cells[cells[column] != ""]
    for _, group in known.groupby(by) if by else [((), known)]:
        if group[column].nunique() > 1:
            first = group.iloc[0]
            other = group[group[column] != first[column]].iloc[0]
            raise UserError(
                f"{first['cell']} and {other['cell']} had different {what} "
                f"({first[column][:12]} and {other[column][:12]}), so they cannot be compared. "
                "Run the older of them again, or put them into separate studies."
            )


def problems(study: Study) -> list[Problem]:
    """Everything to be said in red, gravest first."""
    cells, found = study.cells, []

    def report(kind: str, mask: "pd.Series[bool]", text: str) -> None:
        names = tuple(sorted(cells.loc[mask, "cell"]))
        if names:
            found.append(Problem(kind, f"{text}: {len(names)} of {len(cells)} cells ({_list(names)}).", names))

    status = cells["status"]
    finished = cells[status == "finished"]
    if finished.empty:
        found.append(Problem("empty", "No cell has finished: there is nothing to conclude from yet."))
    elif bool((finished.groupby("arm")["loss"].mean() > finished.groupby("arm")["unigram"].max() - LEARNED).all()):
        found.append(
            Problem(
                "unlearned",
                f"No block learned from context: no mean loss is more than {LEARNED} below what the frequencies of "
                f"single tokens give ({finished['unigram'].max():.3f}). Train longer, or check the learning rate and "
                "its warm-up, before you compare.",
            )
        )
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
                "This folder has no study.json: neither baseline nor analysis was declared before the runs.",
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
