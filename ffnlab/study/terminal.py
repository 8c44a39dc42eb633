"""The report's table in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ffnlab.study import words
from ffnlab.study.answer import Analysis
from ffnlab.study.statistics import BETTER, WORSE

WIDE = 132
STYLES = {BETTER: "bold green", WORSE: "bold red"}


def show(analysis: Analysis, console: Console | None = None) -> None:
    """Problems in red, the table, the sentences."""
    console = console or Console()
    console.print(f"\n[bold]{escape(words.plain(analysis.study.name))}[/]  {escape(words.headline(analysis))}")
    console.print(Text(words.plain(analysis.scale), style="dim"))
    for problem in analysis.problems:
        console.print(Text(f"! {words.plain(problem.text)}", style="red"))
    console.print(_noise(analysis) if analysis.noise else _table(analysis, console.width))
    for arm in analysis.arms:
        if arm.primary:
            console.print(Text(f"- {words.sentence(arm, analysis)}"))
    if far := words.outlying(analysis):
        console.print(Text(f"  {far}", style="dim"))
    for line in analysis.remarks + analysis.limits:
        console.print(Text(f"  {words.plain(line)}", style="dim"))


def _table(analysis: Analysis, width: int) -> Table:
    """All columns where there is room, the ones that carry the verdict where there is not."""
    wide = width >= WIDE
    resampled = "p (signs)" if analysis.study.analysis == "paired" else "p (perm.)"
    # In 80 columns an arm's settings go below its block, a line each, and a name is not broken within a word.
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("block", overflow="fold", min_width=8 if wide else 16)
    headings = ["seeds", "val/loss", "SD", "bpb", "difference", "95% interval", "p (Holm)", resampled]
    for heading in headings if wide else ["n", "val/loss", "difference", "95% interval", "p (Holm)"]:
        table.add_column(heading, justify="right", no_wrap=heading != "seeds")
    table.add_column("verdict", no_wrap=not wide)
    for arm in analysis.arms:
        answer = arm.primary
        row = [words.plain(arm.name) if wide else words.plain(arm.name).replace(" · ", "\n")]
        row += [words.runs(arm), words.number(arm.mean), words.number(arm.sd), words.number(arm.bpb)] if wide else [
            str(arm.n), words.number(arm.mean)
        ]  # fmt: skip
        if answer is None:
            row += [""] * (len(table.columns) - 1 - len(row))
            table.add_row(*(Text(cell) for cell in [*row, "baseline"]), style="dim")
            continue
        row += [
            words.signed(answer.difference),
            words.interval(answer.low, answer.high),
            words.p_value(answer.p_adjusted),
        ]
        row += [words.p_value(answer.p_resampled)] if wide else []
        verdict = words.verdict(answer) if wide else answer.verdict
        table.add_row(*(Text(cell) for cell in row), Text(verdict, style=STYLES.get(answer.verdict, "")))
    return table


def _noise(analysis: Analysis) -> Table:
    table = Table("source", "SD", "share", "p (F)", header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part in analysis.noise.components if analysis.noise else []:
        table.add_row(part.source, words.number(part.sd), words.percent(part.share, 0), words.p_value(part.p))
    return table
