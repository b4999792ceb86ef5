"""The report of a study: one page, and the same tables in Markdown, LaTeX and CSV.

    write_study_report(verdict, folder)      report.html, report.md, report.tex, report.csv, runs.csv
    print_study(verdict)                     the verdicts in a terminal

All of it is made from the verdict alone (`scalerl.study.verdict.verdict`).
"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from scalerl.errors import counted
from scalerl.numbers import rate, rate_interval
from scalerl.study.page.figures import StudyFigure, study_chart, study_figures
from scalerl.study.page.tables import mark_of, plan_rows, study_tables, verdict_table
from scalerl.study.verdict.answers import answers, budget_text
from scalerl.study.verdict.arm_fits import ArmSummary
from scalerl.study.verdict.verdict import KINDS, StudyVerdict
from scalerl.tty import console_for
from scalerl.view import formats
from scalerl.view.assets import link, without_folders, write_text
from scalerl.view.document import Document, PagePart, PageSection, Pair
from scalerl.view.facts.notices import is_made
from scalerl.view.style import inline_svg, save_figure
from scalerl.view.table import Cell

_CHART = (
    "Points are evaluations of every seed of an arm. Line and band: the mean curve of an arm over its "
    "seeds with its interval, the variance between seeds included; thin where no run has been. At the "
    "right edge: the ceiling A."
)
_HEADING = 24
"""Characters at which headings of the table in a terminal wrap."""
_IN_TERMINAL = 7
"""Number of columns that a terminal shows of the verdicts: the questions, the ceiling and the pass rate."""


def write_study_report(verdict: StudyVerdict, folder: str | Path, figures: Sequence[str] = ()) -> list[Path]:
    """Write the report in all of its formats, each file atomically, and return the paths of the files.

    Args:
        verdict: the verdict of the study.
        folder: the folder for the files, created if needed.
        figures: also write every figure as a file of these formats ("svg", "png", "pdf").

    Raises:
        InputError: a figure format is unknown.
        WriteError: a file cannot be written.
    """
    folder, made = Path(folder), study_figures(verdict)
    document = study_document(verdict, folder, made)
    texts = {
        "report.html": document.html(),
        "report.md": document.markdown(),
        "report.tex": document.latex() + ("\n" + verdict.to_latex() if verdict.comparison else ""),
        "report.csv": formats.csv_text([_without_runs(verdict, arm) for arm in verdict.arms]),
        "runs.csv": formats.csv_text(
            [{"arm": arm.name, **run} for arm in verdict.arms for run in verdict.arm_json(arm)["runs"]]
        ),
    }
    written = [write_text(folder / name, text) for name, text in texts.items()]
    for one in made:
        written += [save_figure(one.figure, folder / f"{one.name}.{ending}") for ending in figures]
    return written


def _without_runs(verdict: StudyVerdict, arm: ArmSummary) -> dict[str, Any]:
    """Return the numbers of an arm and of its comparison with the base, as `--json` names them."""
    found, pair = verdict.arm_json(arm), verdict.pairs.get(arm.name)
    pairs = {"measured": found["measured"] or {}, "comparison": asdict(pair) if pair else {}}
    return found | {"runs": len(arm.runs)} | pairs


def print_study(verdict: StudyVerdict, file: TextIO | None = None) -> None:
    """Print the verdicts to `file` (default: standard output), in colour on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    stream = sys.stdout if file is None else file
    terminal = console_for(stream)
    plain = StringIO()
    console = terminal or Console(file=plain, color_system=None, force_terminal=False)
    made = verdict_table(verdict)
    names = [textwrap.fill(name, _HEADING) for name in made.headers[:_IN_TERMINAL]]
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header, name in zip(made.headers, names, strict=False):
        table.add_column(Text(name), justify="left" if header in made.prose else "right", no_wrap=True)
    colours = {"moved": "green", "open": "yellow", "base": "bold", "": ""}
    blocks = []
    for row in made.rows:
        # `Text` keeps the brackets of intervals, which are markup in a string.
        arm, kind, *numbers = (Text(_in_terminal(cell)) for cell in row.cells[:_IN_TERMINAL])
        kind.stylize(colours[row.mark])
        table.add_row(arm, kind, *numbers)
        blocks += [Text(), Text(arm.plain, style="bold")]
        blocks += [
            Text(f"  {name}  {cell.whole}") for name, cell in zip(made.headers, row.cells, strict=True)
        ][1:]
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    if terminal is None:
        console.width = needed
    shown = [table] if needed <= console.width else blocks[1:]
    lines = [Text.assemble((formats.one_line(one.arm), "bold"), ": ", one.text) for one in answers(verdict)]
    doubts = [("caution", text) for text in verdict.cautions]
    doubts += [("warning", text) for text in _warnings(verdict)]
    lines += [Text.assemble((f"{label}: ", "yellow"), text) for label, text in doubts]
    if text := assumptions(verdict):
        lines.append(Text(text, style="dim"))
    head = Text(study_name(verdict), style="bold"), Text(_head(verdict)), Text()
    for part in (*head, *shown, Text(), *lines):
        if isinstance(part, Text):
            part.plain = formats.one_line(part.plain)
        # A pipe gets unwrapped lines.
        console.print(part, soft_wrap=terminal is None and isinstance(part, Text))
    if terminal is None:  # rich pads the lines of a table with spaces
        stream.writelines(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


def study_name(verdict: StudyVerdict) -> str:
    """Return the name of the study."""
    return str(verdict.study.plan.get("name") or verdict.study.path.name)


def assumptions(verdict: StudyVerdict) -> str:
    """Return sentences on the verdicts' assumptions; empty if nothing is compared."""
    return verdict.comparison.priors() if verdict.comparison else ""


def _head(verdict: StudyVerdict) -> str:
    finished = sum(run.outcome == "finished" for run in verdict.study.runs)
    return (
        f"{counted(len(verdict.arms), 'arm')}, {finished} of {len(verdict.study.runs)} runs finished, "
        f"pass rates compared at {budget_text(verdict)}."
    )


def _in_terminal(cell: Cell) -> str:
    """Return a cell of numbers with its interval, and its verdict below; the answers have the reasons."""
    interval, _, claim = cell.beside.partition("\n")
    lines = [f"{cell.text} {interval}", claim] if interval.startswith("[") else [cell.text]
    return "\n".join(formats.one_line(line) for line in lines if line)


def _warnings(verdict: StudyVerdict) -> list[str]:
    return [without_folders(text, verdict.study.path) for text in verdict.study.warnings]


def study_document(verdict: StudyVerdict, folder: Path, figures: Sequence[StudyFigure]) -> Document:
    """Return the page of a study; links to runs are relative to `folder`."""
    parts = {t.name: PagePart(t.title, table=t, kind=t.name) for t in study_tables(verdict)}
    for one in figures:
        svg = inline_svg(one.figure, one.name, one.title)
        parts[f"{one.name} figure"] = PagePart(one.title, svg=svg, note=one.caption)

    def section(title: str, *names: str, opens: bool = False) -> PageSection:
        return PageSection(title, [parts[name] for name in names if name in parts], open=opens)

    parts["plan"] = PagePart(rows=plan_rows(verdict))
    parts["assumptions"] = PagePart(text=assumptions(verdict))
    parts["verdict"] = replace(parts["verdict"], title="", kind="verdict-table")
    if "runs" in parts:
        runs = (verdict.study.path / run.run.plan.folder for arm in verdict.arms for run in arm.runs)
        pages = (run / "report.html" for run in runs)
        links = [link(page, folder) if page.is_file() else "" for page in pages]
        parts["runs"] = replace(parts["runs"], title="", links=links)
    grouped = _grouped(verdict)
    return Document(
        kind="Study of reinforcement learning recipes",
        name=study_name(verdict),
        sentence=_sentence(verdict, grouped),
        answers=grouped,
        chart=study_chart(verdict),
        chart_note=_CHART,
        cautions=[("", text) for text in verdict.cautions],
        warnings=[("", text) for text in _warnings(verdict)],
        sections=[
            section("Verdicts", "verdict", opens=True),
            section("Differences to the base", "measured", "forest figure", opens=True),
            section("The linearised curve", "linearised figure"),
            section("Frozen forecasts", "forecast_scores", "forecasts figure", "forecasts"),
            section("Stability", "stability"),
            section("Decisions during the study", "decisions"),
            section("Runs", "runs"),
            section("The plan", "plan", "changes"),
            section("What is taken for granted", "assumptions"),
        ],
    )


def _sentence(verdict: StudyVerdict, grouped: Sequence[tuple[str, list[Pair], str]]) -> str:
    """Return one sentence on all arms: the direction of each difference, and its size as measured."""

    def named(arm: str) -> str:
        measured = verdict.measured.get(arm)
        if measured is None or not is_made(measured.claim):
            return arm
        ends = sorted(map(abs, measured.difference.interval))
        return f"{arm} by {rate(abs(measured.difference.median))} {rate_interval(ends)}"

    groups = [
        f"{heading[0].lower()}{heading[1:]}: {', '.join(named(arm) for arm, _ in found)}"
        for heading, found, _ in grouped
    ]
    said = "; ".join(groups)
    return f"{said[:1].upper()}{said[1:]}. {_head(verdict)}" if said else _head(verdict)


def _grouped(verdict: StudyVerdict) -> list[tuple[str, list[Pair], str]]:
    """Return the answers, without the base's, grouped by verdict in the order of `KINDS`."""
    at = f"at {budget_text(verdict)}, as measured"
    made, said = [], answers(verdict)
    for kind in KINDS[:-1]:
        if found := [(one.arm, one.text) for one in said if one.kind == kind]:
            made.append((kind.capitalize().replace("as measured", at), found, mark_of(kind)))
    return made
