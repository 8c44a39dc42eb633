"""A saved W&B view of a study: loss curves by block, difference to the baseline, dead neurons by layer.

W&B is a view of the ledger: what the view states as a result (the table, the baseline's mean) is computed here from the
ledger, and only the curves come from W&B's own runs.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffnlab.call import program
from ffnlab.errors import UserError
from ffnlab.study import words
from ffnlab.study.answer import Analysis

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

MAX_LAYERS = 48


def build_workspace(analysis: Analysis, entity: str, project: str, n_layers: int) -> "Workspace":
    """The view of one study. Runs are filtered by group (the study) and grouped by job type (the block).

    Raises:
        UserError: wandb-workspaces is not installed.
    """
    # The client asks its server for a version on import of some parts; silence keeps that out of our output.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces import expr
    except ImportError:
        command = f"{program('pip')} install wandb-workspaces"
        raise UserError(f"The W&B view needs the package wandb-workspaces: {command}") from None

    study = analysis.study
    group = "JobType"

    def line(metric: str, x: str, title: str) -> Any:
        return wr.LinePlot(
            title=title, x=x, y=[metric], groupby=group, groupby_aggfunc="mean", groupby_rangefunc="minmax", title_x=x,
            layout=wr.Layout(w=8, h=8),
        )  # fmt: skip

    def bar(metric: str, title: str, minus: float | None = None) -> Any:
        expressions = [] if minus is None else [f"${{{metric}}} - {minus:.6f}"]
        return wr.BarPlot(
            title=title, metrics=[metric], custom_expressions=expressions or None, groupby=group,
            groupby_aggfunc="mean", groupby_rangefunc="stddev", layout=wr.Layout(w=12, h=8),
        )  # fmt: skip

    mean = analysis.baseline.mean
    known = mean == mean  # no finished run of the baseline, no difference to it
    base = words.plain(study.baseline)
    difference: list[Any] = [wr.MarkdownPanel(markdown=table(analysis), layout=wr.Layout(w=24, h=10))]
    if known:
        difference.append(bar("val/loss", f"val/loss minus {base}'s mean ({mean:.4f})", minus=mean))
    difference.append(bar("val/loss", "val/loss"))
    layers = range(min(n_layers, MAX_LAYERS))
    sections = [
        ws.Section(
            name="Loss by block",
            panels=[line("val/loss", x, f"val/loss by {x}") for x in ("step", "tokens", "flops")]
            + [line("train/loss", "tokens", "train/loss by tokens")],
            is_open=True,
        ),
        ws.Section(name="Difference to the baseline", panels=difference, is_open=True),
        ws.Section(
            name="Dead neurons by layer",
            panels=[line("dead/rel", "step", "dead/rel, mean over layers")]
            + [line(f"dead/rel_L{i}", "step", f"dead/rel, layer {i}") for i in layers],
            is_open=True,
        ),
        ws.Section(
            name="Gates and sparsity",
            panels=[line(m, "step", m) for m in ("gate/never_open", "sparsity/zero", "sparsity/rel", "dormant/rate")],
        ),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Study {words.plain(study.name)}",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=max(10, len(study.cells)), group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(expr.Metric("Group") == study.name),
            groupby=[expr.Metric("JobType")],
            order=[expr.Ordering(expr.Summary("val/loss"), ascending=True)],
            pinned_columns=["summary:val/loss", "summary:val/bpb", "summary:dead/rel"],
        ),
    )


def table(analysis: Analysis) -> str:
    """The verdicts as a Markdown table, from the ledger."""
    md = words.markdown
    lines = [
        f"**{md(words.headline(analysis))}**",
        "",
        f"| block | seeds | loss | difference to {md(analysis.study.baseline)} | 95% interval | p (Holm) | verdict |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for arm in analysis.arms:
        a = arm.primary
        rest = (
            f"{words.signed(a.difference)} | {words.interval(a.low, a.high)} | {words.p_value(a.p_adjusted)} | "
            f"{words.verdict(a)}"
            if a
            else " | | | baseline"
        )
        lines.append(f"| {md(arm.name)} | {words.runs(arm)} | {words.number(arm.mean)} | {rest} |")
    lines += ["", *(f"- {md(problem.text)}" for problem in analysis.problems)]
    return "\n".join(lines)


def count_layers(analysis: Analysis) -> int:
    """Layers that the census looked at, from the results; 0 where there are none yet."""
    return max((len(values) for arm in analysis.arms for values in arm.by_layer.values()), default=0)


def specification(workspace: "Workspace") -> dict[str, Any]:
    """What would be sent to the server, as plain data; identifiers that W&B draws at random are left out."""
    view = workspace._to_model()
    spec = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    return {
        "entity": workspace.entity,
        "project": workspace.project,
        "name": workspace.name,
        "spec": _without_ids(spec),
    }


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key not in ("__id__", "id", "ref", "viewId")}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def write_specification(workspace: "Workspace", path: Path) -> None:
    """The view as a JSON file, without a server.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(specification(workspace), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def save(workspace: "Workspace") -> str:
    """Save the view on the server; its address.

    Raises:
        UserError: no key, no network, no such project.
    """
    try:
        return str(workspace.save_as_new_view().url)
    except Exception as error:  # the client raises many kinds, all of them about the server
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"W&B did not take the view ({reason}). Check `wandb login` and the project, or write a file with --out."
        ) from None
