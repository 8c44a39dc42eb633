"""Write a study's answer: ``report.md``, ``report.html`` (self-contained), ``report.json``, ``cells.csv`` and PNGs."""

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import ffnlab
from ffnlab.call import call
from ffnlab.errors import UserError
from ffnlab.study import chart_theme, words
from ffnlab.study.analyse import analyse
from ffnlab.study.answer import Analysis
from ffnlab.study.chart_parts import names
from ffnlab.study.charts import VARIANT
from ffnlab.study.checks import which_folder
from ffnlab.study.export import as_csv, as_json
from ffnlab.study.load import load_curves, load_study
from ffnlab.study.origin import provenance
from ffnlab.study.page import CHARTS, TERMS, Page, figure, figure_range, page
from ffnlab.study.power import POWER
from ffnlab.study.statistics import LEVEL

if TYPE_CHECKING:
    import jinja2

CENSUS_TOKENS = "census/n"


def write_report(
    paths: Sequence[Path],
    out: Path | None = None,
    baseline: str | None = None,
    kind: str | None = None,
    pictures: bool = True,
) -> list[Analysis]:
    """Analyse the studies and write their report into ``out`` (the first study's folder by default).

    ``pictures=False`` leaves the PNGs away, which take most of the time.

    Raises:
        UserError: a study that cannot be read or whose cells cannot be compared.
    """
    studies = [load_study(_folder(Path(path)), baseline, kind) for path in paths]
    out = Path(out) if out is not None else studies[0].path
    analyses = [analyse(study) for study in studies]
    pages = [
        page(analysis, load_curves(analysis.study), f"s{i}" if len(studies) > 1 else "")
        for i, analysis in enumerate(analyses, 1)
    ]
    out.mkdir(parents=True, exist_ok=True)
    if pictures:
        (out / CHARTS).mkdir(exist_ok=True)
        for figure in (f for p in pages for group in p.groups.values() for f in group):
            _replace(out / figure.file, chart_theme.png(figure.spec))
    _replace(
        out / "report.json",
        (json.dumps(as_json(analyses), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
    )
    _replace(out / "cells.csv", as_csv(analyses, out).encode())
    options = {"--out": out if out != studies[0].path else None, "--baseline": baseline, "--kind": kind}
    given = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
    again = call("scripts/report.py", *paths, *given)
    _replace(out / "report.md", render("report.md.j2", pages, again, pictures=pictures).encode())
    _replace(out / "report.html", render("report.html.j2", pages, again).encode())
    return analyses


def _folder(path: Path) -> Path:
    """A study's folder as given; a file of one, or a folder of studies, is answered with what to give."""
    if path.is_file():
        above = next((folder for folder in path.parents[:2] if (folder / "study.json").exists()), path.parent)
        raise UserError(f"{path} is a file. Give the study's folder, {above}.")
    runs = any(path.glob("*/run.json")) or any((path / name).exists() for name in ("study.json", "run.json"))
    if not runs and any(path.glob("*/study.json")):
        raise UserError(f"{path} is no study, but a folder of studies. {which_folder(path)}")
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write beside and move over, so that nobody ever reads half a report."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _method() -> str:
    """How to read a report, as Markdown, from the same text as the page's."""
    text = resources.files("ffnlab.study").joinpath("templates/method.html").read_text(encoding="utf-8")
    return re.sub(r"</?p>\s*", "\n", text).strip().replace("\n\n\n", "\n\n")


def environment() -> "jinja2.Environment":
    """Templates: HTML escapes everything by itself, in Markdown names go through ``|md``."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.PackageLoader("ffnlab.study"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.filters["md"] = words.markdown
    env.filters["code"] = words.markdown_code
    env.filters["plain"] = words.plain
    env.filters["without_legend"] = chart_theme.without_legend
    env.globals["w"] = words
    return env


def render(template: str, pages: list[Page], again: str, pictures: bool = True) -> str:
    """One of the two templates; ``again`` is the command that writes the report."""

    def facts(analysis: Analysis) -> list[tuple[str, list[str]]]:
        return [*provenance(analysis), ("This report", [words.plain(again)])]

    first = pages[0].analysis.study.name if len(pages) == 1 else f"{len(pages)} studies"
    return environment().get_template(template).render(
        pages=pages, title=first, version=ffnlab.__version__, pictures=pictures, level=LEVEL, power=POWER,
        themes={scheme: chart_theme.theme(scheme, legend=False) for scheme in chart_theme.PALETTES},
        javascript=chart_theme.javascript() if template.endswith("html.j2") else "",
        facts=facts, figure_names=figure_names, names=names,
        census_tokens=census_tokens, method=_method(), terms=TERMS, figure=figure, figure_range=figure_range,
    )  # fmt: skip


def figure_names(analysis: Analysis) -> list[str]:
    """Census figures to show: all that any arm has but the variants at other thresholds, which report.json keeps.

    The size of the token set comes last, and only where it differs: then figures cannot be compared.
    """
    found = {name for arm in analysis.arms for name in arm.figures if not VARIANT.search(name)}
    if census_tokens(analysis):
        found.discard(CENSUS_TOKENS)
    return sorted(found, key=lambda name: (name.startswith("census/"), name))


def census_tokens(analysis: Analysis) -> str:
    """The number of tokens that every final census looked at; empty where they differ or there was none."""
    sizes = {arm.figures[CENSUS_TOKENS] for arm in analysis.arms if CENSUS_TOKENS in arm.figures}
    return f"{sizes.pop():,.0f}" if len(sizes) == 1 else ""
