"""The second stage of a study of learning rates: fresh seeds, each block at the rate its tuning seeds chose."""

import re
from collections.abc import Sequence
from pathlib import Path

from ffnlab.errors import UserError
from ffnlab.study.cells import Cell


def fresh_jobs(study_dir: Path, cells: Sequence[Cell], fresh_seeds: Sequence[int]) -> list[list[str]]:
    """The overrides of the second stage, from the results of the first.

    Args:
        study_dir: the study, with the cells of the first stage run.
        cells: those cells; their seeds are the tuning seeds.
        fresh_seeds: seeds for the comparison.

    Raises:
        UserError: a seed is on both sides: a rate chosen on a seed would be flattered by it.
    """
    from ffnlab.study.load import load_study
    from ffnlab.study.rates import choose_rates

    tuning = sorted({cell.cfg.seed for cell in cells})
    both = sorted(set(tuning) & set(fresh_seeds))
    if both:
        raise UserError(f"seeds {both} are both for tuning and fresh; give other fresh_seeds=[...]")
    study = load_study(study_dir, kind="lr_sensitivity")
    rows = study.cells[study.cells["seed"].isin(tuning)]
    arm_of = dict(zip(rows["cell"], rows["arm"], strict=True))
    first_of = {arm_of[cell.name]: cell for cell in reversed(cells) if cell.name in arm_of}
    jobs: list[list[str]] = []
    for rate in choose_rates(rows, tuning):
        cell = first_of.get(rate.arm)
        if cell is None:
            continue
        if rate.lr is None:
            print(f"{rate.arm}: no rate finished on every tuning seed, so it has no fresh cells")
            continue
        edge = ", at the edge of the grid: try rates beyond it" if rate.at_edge else ""
        print(f"{rate.arm}: learning rate {rate.lr:g} (mean val/loss {rate.loss:.4f} on {len(tuning)} seeds){edge}")
        kept = [o for o in cell.overrides if not re.match(r"^(seed|optim\.lr)=", o)]
        jobs.extend([*kept, f"optim.lr={rate.lr!r}", f"seed={seed}"] for seed in fresh_seeds)
    return jobs
