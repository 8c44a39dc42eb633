"""Numbers and verdicts in words, the same in the terminal, the Markdown and the page."""

import math
import re
import statistics

from ffnlab.study.answer import Analysis, Answer, Arm
from ffnlab.study.checks import START
from ffnlab.study.power import MAX_SEEDS
from ffnlab.study.statistics import BETTER, MIN_SEEDS, NOT_RESOLVED, TOO_FEW, WORSE

NONE = "–"
FEW = 3  # blocks that a headline names where it has no verdict on them
WALL_CLOCK = "Wall clock, with whatever else the machine did; for speed use scripts/bench.py."
MEASURED_ON = (
    "Measured on part of the validation set (train.val_tokens), so that curves do not end at the losses in the table. "
    "Where no validation met a run's end, its last point is the final loss, on the whole set."
)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def plain(text: object) -> str:
    """Text without control characters: names come from configurations and must not drive a terminal."""
    return CONTROL.sub(" ", str(text))


def markdown(text: object) -> str:
    """A name as plain text in Markdown, whatever it holds."""
    return MARKDOWN.sub(r"\\\1", plain(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")


def markdown_code(text: object) -> str:
    """A command to copy, in a code span; what holds markup or backticks of its own stays escaped text."""
    shown = plain(text)
    return markdown(shown) if re.search(r"[`<>]", shown) or not shown.strip() else f"`{shown}`"


def number(value: float | None, digits: int = 4) -> str:
    """Fixed decimals, a dash where there is none."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 4) -> str:
    """With its sign, a true minus."""
    return NONE if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def interval(low: float, high: float) -> str:
    """``−0.0600 to −0.0200``, a dash where there is none."""
    return NONE if math.isnan(low) or math.isnan(high) else f"{signed(low)} to {signed(high)}"


def p_value(p: float) -> str:
    """Three decimals; very small ones as a bound."""
    if math.isnan(p):
        return NONE
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return NONE if value is None or math.isnan(value) else f"{100 * value:.{digits}f}%".replace("-", "−")


def count(value: float) -> str:
    """``1.25M``; a dash where there is none."""
    if math.isnan(value):
        return NONE
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.2f}{suffix}"
    return f"{value:,.0f}"


def seeds(answer: Answer) -> str:
    """Seeds a block that would resolve what was observed; a dash where it is resolved already."""
    if answer.verdict in (BETTER, WORSE, TOO_FEW) or math.isnan(answer.p):
        return NONE
    return f"> {MAX_SEEDS:,}" if answer.seeds_needed is None else f"{answer.seeds_needed}"


def can_resolve(answer: Answer) -> str:
    """The difference that the study could have found; a dash where it found one."""
    return NONE if answer.verdict in (BETTER, WORSE) else number(answer.detectable, 3)


def verdict(answer: Answer) -> str:
    """The verdict with what the study could have seen."""
    if answer.verdict in (BETTER, WORSE, TOO_FEW) or math.isnan(answer.detectable):
        return answer.verdict
    return f"{answer.verdict} (can resolve ≥ {number(answer.detectable, 3)})"


def runs(arm: Arm) -> str:
    """``6`` or ``5 of 6 (1 diverged)``."""
    total = sum(arm.counts.values())
    lost = ", ".join(f"{n} {status}" for status, n in arm.counts.items() if status != "finished")
    return f"{arm.n} of {total} ({lost})" if lost else str(arm.n)


def sentence(arm: Arm, analysis: Analysis) -> str:
    """What was found about one arm, for somebody who reads nothing else."""
    name, base = plain(arm.name), plain(analysis.baseline.name)
    at = f" at its own learning rate ({arm.lr:g})" if arm.lr is not None else ""
    answer = arm.primary
    if answer is None:
        loss = f"a validation loss of {number(arm.mean)} nats per token" if arm.n else "no finished run"
        spread = f" (SD {number(arm.sd)})" if arm.n > 1 else ""
        return f"{name} is the baseline{at}: {loss}{spread}, {_seeds(arm)}."
    if math.isnan(answer.difference):
        return f"{name}{at} cannot be compared with {base}: {_seeds(arm)} finished."
    way = "lower" if answer.difference < 0 else "higher"
    measured = f"{number(abs(answer.difference))} nats per token {way}"
    pair = (
        f"{answer.n} seed{'' if answer.n == 1 else 's'} each"
        if answer.n == answer.n_baseline
        else f"{answer.n} and {answer.n_baseline} seeds"
    )
    lost = _lost(arm)
    if answer.verdict == TOO_FEW:
        return (
            f"{name}{at} has too few seeds for a verdict: its loss was {measured} than that of {base} ({pair}).{lost}"
        )
    between = f"95% interval {interval(answer.low, answer.high)}, Holm-adjusted p {p_value(answer.p_adjusted)}, {pair}"
    if answer.verdict in (BETTER, WORSE):
        return f"{name}{at} is {answer.verdict} than {base}: its loss is {measured} ({between}).{lost}"
    more = ""
    if not math.isnan(answer.detectable) and not answer.note:
        more = f" This study can resolve differences of {number(answer.detectable, 3)} and more"
        more += f"; {_needed(answer)} seeds a block would resolve one as small as this." if answer.difference else "."
    note = f" {answer.note}" if answer.note else ""
    if not answer.note and (answer.low > 0 or answer.high < 0):
        note = f" The interval is for this block alone; over {analysis.comparisons} blocks chance gives such too often."
    return f"{name}{at} is not resolved against {base}: its loss was {measured} ({between}).{more}{note}{lost}"


def _seeds(arm: Arm) -> str:
    return f"{runs(arm)} seed{'' if runs(arm) == '1' else 's'}"


def _needed(answer: Answer) -> str:
    return f"more than {MAX_SEEDS:,}" if answer.seeds_needed is None else f"about {answer.seeds_needed}"


def _lost(arm: Arm) -> str:
    lost = [f"{n} {status}" for status, n in arm.counts.items() if status != "finished"]
    return f" Not counted in: {', '.join(lost)}." if lost else ""


def primary_name(analysis: str) -> str:
    """What the primary analysis is, in a phrase."""
    return {
        "unpaired": "unpaired (Welch's t, Holm over the blocks)",
        "paired": "paired (t of per-seed differences, Holm over the blocks)",
    }[analysis]


def headline(analysis: Analysis) -> str:
    """One sentence for the whole study."""
    study = analysis.study
    if not (study.cells["status"] == "finished").any():
        return f"No verdict: 0 of {len(study.cells)} cells finished."
    if analysis.noise:
        n = analysis.noise
        return (
            f"Two runs of {plain(study.baseline)} that differ only in their seeds have a standard deviation of "
            f"{number(n.sd)} nats per token; {n.grid.shape[0]} init seeds crossed with {n.grid.shape[1]} data seeds."
        )
    base = plain(analysis.baseline.name)
    by_verdict: dict[str, list[str]] = {}
    for arm in analysis.arms:  # a dict keeps the table's order: of the blocks, and of the verdicts by their first block
        if arm.primary:
            by_verdict.setdefault(arm.primary.verdict, []).append(plain(arm.name))
    if not by_verdict:
        return "There is no block to compare with the baseline."
    so_far = _so_far(analysis)
    if set(by_verdict) == {TOO_FEW}:
        if so_far:
            return f"Nothing has been compared with {base} yet: {so_far}."
        return f"No verdict against {base}: it takes {MIN_SEEDS} finished seeds a block."
    said = _found(by_verdict, base)
    said = (
        f"So far, with {so_far}: {said}."
        if so_far
        else f"{said[0].upper() if not _firm(by_verdict) else said[0]}{said[1:]}."
    )
    if any(problem.kind in START for problem in analysis.problems):
        said += " That is of a start of training: see the warnings."
    return said


def _firm(by_verdict: dict[str, list[str]]) -> bool:
    return bool({BETTER, WORSE} & set(by_verdict))


def _found(by_verdict: dict[str, list[str]], base: str) -> str:
    """The verdicts in words; blocks without a firm one are named while they are few, else counted, and last."""
    named, counted = [], []
    open_words = {NOT_RESOLVED: ("not resolved", "not resolved"), TOO_FEW: ("no verdict yet", "without a verdict yet")}
    for verdict, arms in by_verdict.items():
        one = len(arms) == 1
        if verdict in (BETTER, WORSE):
            named.append(f"{listed(arms)} {'is' if one else 'are'} {verdict} than {base}")
        elif len(arms) > FEW:
            counted.append(f"{len(arms)} {open_words[verdict][1]}")
        else:
            verb = ("is" if one else "are") if verdict == NOT_RESOLVED else ("has" if one else "have")
            named.append(f"{listed(arms)} {verb} {open_words[verdict][0]}")
    said = "; ".join([*named, *counted])
    if _firm(by_verdict):
        return said
    none = f"no block is shown to differ from {base}"
    return f"{none}: {said}" if named else none


def _so_far(analysis: Analysis) -> str:
    """``5 of 9 cells finished`` while cells are open; empty where all have ended, diverged ones too."""
    study = analysis.study
    status, whole = study.cells["status"], len(study.cells) + len(study.damaged)
    if not study.damaged and status.isin(["finished", "diverged"]).all():
        return ""
    return f"{int((status == 'finished').sum())} of {whole} cells finished"


def listed(names: list[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def in_order(analysis: Analysis) -> list[Arm]:
    """Arms as the answers come, in every report: as in the table, the baseline last."""
    return sorted(analysis.arms, key=lambda arm: arm.baseline)


def pairing(analysis: Analysis) -> str:
    """What pairing bought, in words, from the variance ratios measured."""
    ratios = [arm.variance_ratio for arm in analysis.arms if not math.isnan(arm.variance_ratio)]
    if not ratios:
        return "With fewer than three shared seeds there is no telling what pairing bought."
    typical = statistics.median(ratios)
    verdict = (
        "pairing made the comparison more precise"
        if typical > 1.5
        else "pairing cost precision"
        if typical < 1 / 1.5
        else "pairing by seed bought little or nothing in precision"
    )
    return (
        f"Variance of the difference unpaired over paired: {number(min(ratios), 2)} to {number(max(ratios), 2)}, "
        f"in the middle {number(typical, 2)}: {verdict}. With few seeds these ratios are themselves rough."
    )


def outlying(analysis: Analysis) -> str:
    """Which runs lie far from the others of their block; empty where none does."""
    said = []
    for run in analysis.outlying:
        seed = f"seed {run.init_seed}"
        if run.init_seed != run.data_seed:
            seed = f"init seed {run.init_seed} with data seed {run.data_seed}"
        said.append(f"{plain(run.arm)} {seed} ({signed(run.distance, 1)})")
    if not said:
        return ""
    return f"Far from its block's median (in robust SDs), and counted all the same: {', '.join(said)}."
