"""Several runs on one page, and the same tables in Markdown and LaTeX, the curves as figures.

write_runs_report(view, "runs.html")     self-contained, its chart interactive
runs_markdown(view), runs_latex(view)    the tables as text
write_figures(view, "figures")           overlay and linearised curves as SVG, PNG and PDF
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerl.view import formats
from scalerl.view.assets import CHART, asset, page, script_json, write_text
from scalerl.view.facts.notices import sentence
from scalerl.view.numbers import axis_name, percent, rate
from scalerl.view.runs.gathered import RunsView, assumptions, taken, warnings_of
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.tables import runs_tables


def write_runs_report(view: RunsView, out: str | Path) -> Path:
    """Write the page of several runs, which links to nothing, and return where it is.

    Raises:
        WriteError: the disk does not take it.
    """
    return write_text(Path(out), page("runs.html", _content(view)))


def _content(view: RunsView) -> dict[str, Any]:
    return {
        "name": view.title,
        "facts": _facts(view),
        "unfit": [(run.name, sentence(run.reason)) for run in view.runs if run.fit is None],
        "data": script_json(overlay(view.runs, budget=view.budget, target=view.target)),
        "scripts": [asset(name) for name in CHART],
        "look": asset("chart.css"),
        "tables": {table.name: table for table in runs_tables(view)},
        "not_compared": view.not_compared,
        "groups": [(name, ", ".join(runs)) for name, runs in view.groups.items() if len(runs) > 1],
        "assumptions": assumptions(view),
        "taken": [(run.name, text) for run in view.runs if (text := taken(run))],
        "warnings": [(run.name, said) for run in view.runs if (said := warnings_of(run))],
    }


def _facts(view: RunsView) -> list[tuple[str, str]]:
    evaluations = sum(len(run.points) for run in view.runs)
    found = [
        ("metric", "; ".join(map(str, view.metrics))),
        ("runs", f"{len(view.runs)}"),
        ("evaluations", f"{evaluations:,}"),
        ("compute axis", axis_name(view.axis)),
        ("intervals", percent(view.level)),
    ]
    if view.budget is not None:
        found.append(("budget", view.unit.show(view.budget)))
    if view.target is not None:
        found.append(("target", rate(view.target)))
    return found


def runs_markdown(view: RunsView) -> str:
    """All tables in Markdown, what they rest on below."""
    escaped = formats.markdown_text
    found = [f"# {escaped(view.title)}"]
    found += [formats.markdown(table).rstrip("\n") for table in runs_tables(view)]
    if view.not_compared:
        found.append(escaped(view.not_compared))
    said = [*assumptions(view)]
    said += [f"{run.name}: {text}" for run in view.runs if (text := taken(run))]
    said += [f"{run.name}: warning: {text}" for run in view.runs for text in warnings_of(run)]
    found.append("## What is taken for granted\n\n" + "\n".join(f"- {escaped(text)}" for text in said))
    return "\n\n".join(found) + "\n"


def runs_latex(view: RunsView) -> str:
    """All tables in LaTeX, to be read by `\\input`."""
    return formats.latex_document(runs_tables(view))
