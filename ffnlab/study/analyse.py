"""From a study's tables to its answer: one `Arm` a block, ready to be shown or written as JSON."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ffnlab.errors import UserError
from ffnlab.study import rates, remarks, statistics
from ffnlab.study.answer import Analysis, Answer, Arm
from ffnlab.study.checks import Problem, problems, refuse_unequal
from ffnlab.study.load import Study
from ffnlab.study.noise import noise_floor
from ffnlab.study.power import detectable_difference, seeds_needed, seeds_needed_paired
from ffnlab.study.rates import Rate
from ffnlab.study.statistics import BETTER, NOT_RESOLVED, WORSE, Array

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("dead/", "gate/", "dormant/", "sparsity/", "census/n")
ANALYSES = ("unpaired", "paired")


def analyse(study: Study) -> Analysis:
    """Answer the study's question.

    Raises:
        UserError: cells that cannot be compared, or a design that does not answer its question.
    """
    refuse_unequal(study)
    cells = study.cells
    chosen: list[Rate] = []
    tuning: list[int] = []
    if study.kind == "lr_sensitivity":
        if cells["lr"].nunique() < 2:
            raise UserError("This study has only one learning rate, so there is no rate to choose.")
        tuning, fresh = rates.split_seeds([int(s) for s in cells["seed"]], study.tuning_seeds)
        chosen = rates.choose_rates(cells, tuning)
        cells = rates.fresh_cells(cells, chosen, fresh)
    found = _damaged(study) + remarks.warmup_problems(study, cells) + problems(study, cells) + _rate_problems(chosen)
    by_seed = _by_seed(study, cells)
    # Two crossed runs of one seed are no pair and no seed of a study: only the noise floor reads such a grid.
    noise = noise_floor(study.cells) if study.kind == "noise_floor" else None
    answers = {} if noise else _answers(study, cells, by_seed)
    at_rate = {rate.arm: rate.lr for rate in chosen}
    arms = [_arm(study, name, cells, by_seed, answers.get(name, []), at_rate.get(name)) for name in study.arms]
    arms.sort(key=lambda arm: (math.isnan(arm.mean), arm.mean if not math.isnan(arm.mean) else 0.0))
    correlations = by_seed.corr(min_periods=statistics.MIN_SEEDS)
    family = sum(not math.isnan(a.primary.p) for a in arms if a.primary)
    return Analysis(
        study=study,
        problems=found + remarks.speed_problems(arms),
        arms=arms,
        correlations={a: {b: float(correlations[b][a]) for b in study.arms} for a in study.arms},
        comparisons=family,
        limits=([] if noise else _limits(study, arms)) + [remarks.SCOPE],
        rates=chosen,
        tuning_seeds=tuning,
        noise=noise,
        compared=cells,
        scale=remarks.scale(arms, cells, remarks.data_names(study), crossed=noise is not None),
        outlying=remarks.outlying(cells),
        remarks=remarks.many_dead(arms),
    )


def _damaged(study: Study, most: int = 3) -> list[Problem]:
    """One problem for all the cells whose records could not be read."""
    if not study.damaged:
        return []
    names, whole = tuple(sorted(study.damaged)), len(study.cells) + len(study.damaged)
    said = "; ".join(study.damaged[name] for name in names[:most]) + ("; ..." if len(names) > most else "")
    return [Problem("damaged", f"Left out, their records are damaged: {len(names)} of {whole} cells ({said}).", names)]


def _rate_problems(chosen: list[Rate]) -> list[Problem]:
    found = []
    for rate in chosen:
        if rate.lr is None:
            found.append(
                Problem("rate", f"{rate.arm} finished at no learning rate on all tuning seeds, so it has none.")
            )
        elif rate.at_edge:
            found.append(
                Problem(
                    "rate", f"{rate.arm} did best at {rate.lr:g}, an end of the grid: its best rate may lie outside."
                )
            )
    return found


def _by_seed(study: Study, cells: "pd.DataFrame") -> "pd.DataFrame":
    """Final losses, seeds down and arms across; NaN where there is none."""
    table = cells.pivot_table(index="seed", columns="arm", values="loss", aggfunc="mean", dropna=False)
    return table.reindex(columns=study.arms).astype(float)


def _answers(study: Study, cells: "pd.DataFrame", by_seed: "pd.DataFrame") -> dict[str, list[Answer]]:
    losses: dict[str, Array] = {arm: by_seed[arm].to_numpy() for arm in study.arms}
    diverged = cells[cells["status"] == "diverged"].groupby("arm").size()
    result: dict[str, list[Answer]] = {}
    for analysis in sorted(ANALYSES, key=lambda name: name != study.analysis):
        compared = statistics.compare(losses, study.baseline, analysis)
        names = list(compared)
        plain = statistics.holm(np.array([float(c.p) for c in compared.values()]))
        blocks = int(np.isfinite(plain).sum())
        for name, p_plain in zip(names, plain, strict=True):
            answer = _answer(
                analysis,
                analysis == study.analysis,
                compared[name],
                float(p_plain),
                losses[name],
                losses[study.baseline],
                blocks,
            )
            lost = int(diverged.get(name, 0)), int(diverged.get(study.baseline, 0))
            result.setdefault(name, []).append(_settle(answer, *lost))
    return result


def _answer(
    analysis: str,
    primary: bool,
    c: statistics.Comparison,
    p_plain: float,
    block: Array,
    baseline: Array,
    blocks: int,
) -> Answer:
    difference = float(c.difference)
    if analysis == "unpaired":
        x, y = statistics.present(block), statistics.present(baseline)
        resampled, bca = statistics.permutation_p(x, y), statistics.bca_interval(x, y)
        enough = min(len(x), len(y)) >= statistics.MIN_SEEDS
        needed = seeds_needed(difference, float(x.std(ddof=1)), float(y.std(ddof=1)), blocks) if enough else None
    else:
        d = statistics.shared_differences(block, baseline)
        resampled, bca = statistics.sign_flip_p(d), statistics.bca_interval(d)
        needed = (
            seeds_needed_paired(difference, float(d.std(ddof=1)), blocks) if len(d) >= statistics.MIN_SEEDS else None
        )
    return Answer(
        analysis=analysis,
        primary=primary,
        verdict=str(c.verdict),
        n=c.n,
        n_baseline=c.n_baseline,
        difference=difference,
        low=float(c.low),
        high=float(c.high),
        wide_low=float(c.wide_low),
        wide_high=float(c.wide_high),
        p=float(c.p),
        p_adjusted=float(c.p_adjusted),
        p_adjusted_plain=p_plain,
        p_resampled=resampled.p,
        p_resampled_exact=resampled.exact,
        p_resampled_floor=resampled.floor,
        bca=bca,
        detectable=detectable_difference(float(c.se), float(c.df), blocks),
        seeds_needed=needed,
    )


def _settle(answer: Answer, diverged: int, diverged_baseline: int) -> Answer:
    """An arm whose runs diverged is not called better by those that survived, nor one worse than such a baseline.

    The survivors are a selected sample: averaging them would reward a block for blowing up on its hard seeds.
    """
    import dataclasses

    if answer.verdict == BETTER and diverged:
        note = f"Lower where it finished, but {diverged} of its runs diverged, so it is not called better."
        return dataclasses.replace(answer, verdict=NOT_RESOLVED, note=note)
    if answer.verdict == WORSE and diverged_baseline:
        note = f"Higher where both finished, but {diverged_baseline} of the baseline's runs diverged: not called worse."
        return dataclasses.replace(answer, verdict=NOT_RESOLVED, note=note)
    return answer


def _arm(
    study: Study,
    name: str,
    cells: "pd.DataFrame",
    by_seed: "pd.DataFrame",
    answers: list[Answer],
    lr: float | None,
) -> Arm:
    every = study.cells[study.cells["arm"] == name]
    own = cells[cells["arm"] == name]
    done = own[own["status"] == "finished"]
    # A crossed grid has many runs of one seed; its mean and SD are over runs.
    losses = done["loss"].to_numpy(dtype=float)
    matched = [value for value in every["matched"] if value is not None]
    both = by_seed[[name, study.baseline]].dropna() if name != study.baseline else by_seed.iloc[:0]
    enough = len(both) >= statistics.MIN_SEEDS
    return Arm(
        name=name,
        block=str(every["block"].iloc[0]),
        baseline=name == study.baseline,
        lr=lr,
        counts={str(k): int(v) for k, v in sorted(own["status"].value_counts().items())},
        n=len(losses),
        mean=float(losses.mean()) if len(losses) else math.nan,
        sd=float(losses.std(ddof=1)) if len(losses) > 1 else math.nan,
        bpb=_mean(done, "bpb"),
        perplexity=_mean(done, "perplexity"),
        losses={int(s): float(v) for s, v in zip(by_seed.index, by_seed[name], strict=True) if not math.isnan(v)},
        d_ff=_mean(every, "d_ff"),
        params=_mean(every, "params"),
        ffn_params=_mean(every, "ffn_params"),
        flops=_mean(every, "flops"),
        mismatch=_mean(every, "mismatch"),
        matched=all(matched) if matched else None,
        tokens_per_s=_mean(done, "tokens_per_s"),
        **_figures(done),
        answers=answers,
        correlation=float(both[name].corr(both[study.baseline])) if enough else math.nan,
        variance_ratio=statistics.variance_ratio(by_seed[name].to_numpy(), by_seed[study.baseline].to_numpy())
        if enough
        else math.nan,
    )


def _mean(cells: "pd.DataFrame", column: str) -> float:
    values = cells[column].dropna()
    return float(values.mean()) if len(values) else math.nan


def _figures(done: "pd.DataFrame") -> dict[str, Any]:
    """Final census figures, mean and range over seeds: the layer means, and the profiles over layers."""
    from ffnlab.study.load import LAYER

    collected: dict[str, list[float]] = {}
    for result in done["result"]:
        for key, value in result.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if key.startswith(FIGURES) and number:
                collected.setdefault(key, []).append(float(value))
    layers: dict[str, dict[int, list[float]]] = {}
    for key, values in sorted(collected.items()):
        if match := LAYER.match(key):
            layers.setdefault(match["metric"], {})[int(match["layer"])] = values
    whole = {key: values for key, values in sorted(collected.items()) if not LAYER.match(key)}
    profiles = {metric: [values for _, values in sorted(found.items())] for metric, found in layers.items()}
    return {
        "figures": {key: float(np.mean(values)) for key, values in whole.items()},
        "by_layer": {metric: [float(np.mean(values)) for values in found] for metric, found in profiles.items()},
        "ranges": {key: (min(values), max(values)) for key, values in whole.items()},
        "layer_ranges": {metric: [(min(v), max(v)) for v in found] for metric, found in profiles.items()},
    }


def _limits(study: Study, arms: list[Arm]) -> list[str]:
    """What so few seeds cannot show, said where it bites."""
    said = []
    unpaired = [a for arm in arms for a in arm.answers if a.analysis == "unpaired"]
    paired = [a for arm in arms for a in arm.answers if a.analysis == "paired"]
    n = min((min(a.n, a.n_baseline) for a in unpaired), default=0)
    if unpaired and n < statistics.MIN_SEEDS:
        said.append(
            f"Some block has {n} seed{'' if n == 1 else 's'}; "
            "with fewer than 3 a block there is no interval and no verdict."
        )
    for answers, what, enough in ((unpaired, "permutation", "four seeds a block"), (paired, "sign-flip", "six seeds")):
        floor = max((a.p_resampled_floor for a in answers), default=0.0)
        if floor > 0.05:
            said.append(
                f"The {what} p cannot go below {floor:.2g} with this many seeds; it takes {enough} to reach .05."
            )
    if any(a.bca is None for a in unpaired) and n < statistics.MIN_SEEDS_BCA:
        said.append("There is no BCa interval below five seeds.")
    if unpaired and study.analysis == "unpaired" and any(a.p_adjusted_plain <= 0.05 < a.p_adjusted for a in unpaired):
        said.append(
            "Plain Welch with Holm would call one more block different; with so few seeds it does so too often when "
            "variances differ, so the verdict uses fewer degrees of freedom."
        )
    return said
