"""Write a study's answer: ``report.md``, ``report.html`` (self-contained), ``report.json`` and a PNG of each chart."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ffnlab
from ffnlab.study import chart_theme, charts, words
from ffnlab.study.analyse import analyse
from ffnlab.study.answer import Analysis, Arm
from ffnlab.study.load import load_curves, load_study
from ffnlab.study.power import POWER
from ffnlab.study.statistics import LEVEL

if TYPE_CHECKING:
    import jinja2
    import pandas as pd

CHARTS = "charts"  # the folder of PNGs beside the report
GROUPS = ("differences", "noise", "rates", "other", "curves", "dead", "profiles")
CENSUS_TOKENS = "census/n"
VARIANT = re.compile(r"_n\d+$")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


@dataclass(frozen=True)
class Figure:
    """One chart on the page and its PNG."""

    key: str
    title: str
    caption: str
    spec: chart_theme.Spec

    @property
    def file(self) -> str:
        """Path of the PNG, relative to the report."""
        return f"{CHARTS}/{self.key}.png"


@dataclass(frozen=True)
class Page:
    """One study with everything its report shows."""

    key: str
    analysis: Analysis
    groups: dict[str, list[Figure]]
    never_dead: list[str]  # arms without a dead neuron at any census


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
    studies = [load_study(Path(path), baseline, kind) for path in paths]
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
    _replace(out / "report.md", render("report.md.j2", pages, pictures=pictures).encode())
    _replace(out / "report.html", render("report.html.j2", pages).encode())
    return analyses


def _replace(path: Path, content: bytes) -> None:
    """Write beside and move over, so that nobody ever reads half a report."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def page(analysis: Analysis, curves: "pd.DataFrame", prefix: str = "") -> Page:
    """All figures of one study, in groups, in the order of the page."""
    key = f"{prefix}-" if prefix else ""
    groups: dict[str, list[Figure]] = {group: [] for group in GROUPS}

    def add(group: str, name: str, title: str, caption: str, spec: chart_theme.Spec | None) -> None:
        if spec is not None:
            groups[group].append(Figure(key + _slug(name), title, caption, spec))

    add(
        "differences", "forest", "Difference to the baseline",
        "Thick: the 95% interval of one block by itself. Thin: simultaneous 95% intervals over all blocks; where a "
        "thin one stays clear of zero, the verdict is better or worse.",
        charts.forest(analysis),
    )  # fmt: skip
    seeds = f"One point a run, the bar is the mean. {words.outlying(analysis)}".strip()
    add("differences", "seeds", "Every seed", seeds, charts.seed_points(analysis))
    add(
        "rates",
        "rates",
        "Loss by learning rate",
        "Filled points and the line: tuning seeds. Hollow: fresh seeds.",
        charts.rate_curves(analysis),
    )
    add(
        "noise",
        "grid",
        "Loss by init seed and data seed",
        "One run a field; darker is higher.",
        charts.noise_grid(analysis),
    )
    add(
        "other",
        "forest-other",
        "The other analysis, exploratory",
        "It was not declared as primary; no verdict rests on it.",
        charts.forest(analysis, 1),
    )
    for axis, label in charts.AXES.items():
        caption = words.WALL_CLOCK if axis == "seconds" else ""
        add("curves", f"loss-{axis}", f"Against {label}", caption, charts.loss_curves(analysis, curves, axis))
    maps = charts.dead_maps(analysis, curves)
    for arm, spec in maps.items():
        if spec is None:
            continue
        top = spec["encoding"]["color"]["scale"]["domain"][1]
        add("dead", f"dead-{arm}", words.plain(arm), f"Full colour is {words.percent(top)}.", spec)
    for metric, spec in charts.profiles(analysis).items():
        add("profiles", f"profile-{metric}", metric, "", spec)
    taken: set[str] = set()
    for figures in groups.values():
        for i, figure in enumerate(figures):
            name, n = figure.key, 2
            while name in taken:  # two names that differ only in what a file name cannot hold
                name, n = f"{figure.key}-{n}", n + 1
            taken.add(name)
            figures[i] = dataclasses.replace(figure, key=name)
    return Page(prefix or "study", analysis, groups, [words.plain(arm) for arm, spec in maps.items() if spec is None])


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "chart"


def escape_markdown(text: object) -> str:
    """A name as plain text in Markdown, whatever it holds."""
    return MARKDOWN.sub(r"\\\1", words.plain(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")


def markdown_code(text: object) -> str:
    """A command to copy, in a code span; what holds markup or backticks of its own stays escaped text."""
    shown = words.plain(text)
    return escape_markdown(shown) if re.search(r"[`<>]", shown) or not shown.strip() else f"`{shown}`"


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
    env.filters["md"] = escape_markdown
    env.filters["code"] = markdown_code
    env.filters["plain"] = words.plain
    env.filters["without_legend"] = chart_theme.without_legend
    env.globals["w"] = words
    return env


def render(template: str, pages: list[Page], pictures: bool = True) -> str:
    """One of the two templates."""
    first = pages[0].analysis.study.name if len(pages) == 1 else f"{len(pages)} studies"
    return environment().get_template(template).render(
        pages=pages, title=first, version=ffnlab.__version__, pictures=pictures, level=LEVEL, power=POWER,
        themes={scheme: chart_theme.theme(scheme, legend=False) for scheme in chart_theme.PALETTES},
        javascript=chart_theme.javascript() if template.endswith("html.j2") else "",
        facts=provenance, figure_names=figure_names, names=charts.names,
        census_tokens=census_tokens, method=_method(),
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


def provenance(analysis: Analysis) -> list[tuple[str, str]]:
    """What produced the numbers: command, revision, data, code, devices."""
    study = analysis.study
    cells = study.cells

    def all_of(column: str) -> str:
        values = sorted({words.plain(value) for value in cells[column] if value})
        return ", ".join(values) or "not recorded"

    revision = all_of("revision") + (" with uncommitted changes" if cells["dirty"].any() else "")
    said = "declared in study.json before the runs" if study.declared else "not declared before the runs"
    return [
        ("Command", words.plain(study.command) or "not recorded"),
        ("Revision", revision),
        ("Data hash", all_of("hash_data")),
        ("Code fingerprint", all_of("code")),
        ("Device", all_of("device")),
        ("Primary analysis", f"{words.primary_name(study.analysis)}, {said}"),
    ]


def as_json(analyses: list[Analysis]) -> dict[str, Any]:
    """The report as plain data.

    What depends on the machine's speed is under ``timing`` alone: the rest of a resumed study's report equals that of
    an undisturbed one.
    """
    return {
        "ffnlab": ffnlab.__version__,
        "level": LEVEL,
        "power": POWER,
        "studies": [_study_json(analysis) for analysis in analyses],
    }


def _study_json(analysis: Analysis) -> dict[str, Any]:
    study = analysis.study
    cells = study.cells.sort_values("cell")
    columns = [
        "arm", "block", "lr", "seed", "init_seed", "data_seed", "status", "stale", "error", "loss", "perplexity", "bpb",
        "steps", "tokens", "d_ff", "params", "flops", "mismatch", "matched",
    ]  # fmt: skip
    record: dict[str, Any] = {
        "study": study.name,
        "kind": study.kind,
        "analysis": study.analysis,
        "declared": study.declared,
        "baseline": study.baseline,
        "comparisons": analysis.comparisons,
        "headline": words.headline(analysis),
        "provenance": dict(provenance(analysis)),
        "scale": analysis.scale,
        "problems": [dataclasses.asdict(problem) for problem in analysis.problems if problem.kind != "speed"],
        "limits": analysis.limits,
        "arms": [_arm_json(arm, analysis) for arm in analysis.arms],
        "correlations": analysis.correlations,
        "pairing": words.pairing(analysis),
        "rates": [dataclasses.asdict(rate) for rate in analysis.rates],
        "tuning_seeds": analysis.tuning_seeds,
        "noise": None,
        "cells": {str(row["cell"]): {c: row[c] for c in columns} for row in cells.to_dict("records")},
        "outlying": [dataclasses.asdict(run) for run in analysis.outlying],
        "timing": {
            "problems": [dataclasses.asdict(problem) for problem in analysis.problems if problem.kind == "speed"],
            "arms": {arm.name: {"tokens_per_s": arm.tokens_per_s} for arm in analysis.arms},
            "cells": {
                str(row["cell"]): {"seconds": row["seconds"], "tokens_per_s": row["tokens_per_s"]}
                for row in cells.to_dict("records")
            },
        },
    }
    if analysis.noise:
        noise = {
            f.name: getattr(analysis.noise, f.name) for f in dataclasses.fields(analysis.noise) if f.name != "grid"
        }
        noise["components"] = [dataclasses.asdict(component) for component in analysis.noise.components]
        grid = analysis.noise.grid
        noise["grid"] = {str(i): {str(j): float(v) for j, v in row.items()} for i, row in grid.iterrows()}
        record["noise"] = noise
    return dict(_plain(record))


def _arm_json(arm: Arm, analysis: Analysis) -> dict[str, Any]:
    record = dataclasses.asdict(arm)
    record.pop("tokens_per_s")
    record["sentence"] = words.sentence(arm, analysis)
    record["verdict"] = arm.primary.verdict if arm.primary else None
    return record


def _plain(value: Any) -> Any:
    """Plain JSON: string keys, no NaN, no numpy scalars."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
