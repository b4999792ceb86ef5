"""The report of a study: one page, and the same tables in Markdown, LaTeX and CSV.

    write_study_report(verdict, folder)      report.html, report.md, report.tex, report.csv, runs.csv
    print_study(verdict)                     the verdicts in a terminal

All of it is made from the verdict alone (`scalerl.study.verdict.verdict`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scalerl.errors import counted
from scalerl.study.page.tables import plan_rows, runs_table, stability_table, study_tables, verdict_table
from scalerl.study.verdict.answers import HEADINGS, Answer, answers, budget_text
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.tty import console_for
from scalerl.view import formats
from scalerl.view.assets import link, page, without_folders, write_text
from scalerl.view.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from scalerl.study.page.figures import StudyFigure

_IN_TERMINAL = (
    *("arm", "seeds_finished", "A", "pass_rate_at_budget"),
    *("A_difference", "compute_to_own_ratio", "verdict"),
)


def write_study_report(verdict: StudyVerdict, folder: str | Path, figures: Sequence[str] = ()) -> list[Path]:
    """Write the report in all of its formats, each file whole or not at all, and return where they are.

    Args:
        verdict: the answer of the study.
        folder: where the files go; made where there is none.
        figures: also write every figure as a file of these formats ("svg", "png", "pdf").

    Raises:
        InputError: a figure is asked for in another format.
        WriteError: the disk does not take a file.
    """
    from scalerl.study.page.figures import study_figures
    from scalerl.view.style import save_figure

    folder, made = Path(folder), study_figures(verdict)
    texts = {
        "report.html": study_html(verdict, folder, made),
        "report.md": study_markdown(verdict),
        "report.tex": study_latex(verdict),
        "report.csv": formats.csv_text(*formats.joined(verdict_table(verdict), stability_table(verdict))),
        "runs.csv": formats.csv_text(runs_table(verdict).keys, runs_table(verdict).raw_rows()),
    }
    written = [write_text(folder / name, text) for name, text in texts.items()]
    for one in made:
        written += [save_figure(one.figure, folder / f"{one.name}.{ending}") for ending in figures]
    return written


def study_html(
    verdict: StudyVerdict, folder: Path | None = None, figures: Sequence[StudyFigure] | None = None
) -> str:
    """The page as text; the same for the same input.

    Links to runs are relative to `folder`; `figures` are drawn here where they are not given.
    """
    from scalerl.study.page.figures import study_figures

    figures = study_figures(verdict) if figures is None else figures
    return page("study.html", _content(verdict, folder or verdict.study.path, figures))


def study_markdown(verdict: StudyVerdict) -> str:
    """The answers and all tables in Markdown."""
    escaped = formats.markdown_text
    found = [f"# {escaped(study_name(verdict))}", escaped(_head(verdict))]
    found.append("\n".join(f"- **{escaped(one.arm)}** {escaped(one.text)}" for one in answers(verdict)))
    if said := _doubts(verdict):
        found.append("\n".join(f"- {label}: {escaped(text)}" for label, text in said))
    found += [formats.markdown(table).rstrip("\n") for table in study_tables(verdict)]
    rows = "\n".join(f"| {label} | {escaped(text)} |" for label, text in plan_rows(verdict))
    found.append(f"## Plan\n\n| | |\n| :-- | :-- |\n{rows}")
    if assumed := assumptions(verdict):
        found.append(f"## What is taken for granted\n\n{escaped(assumed)}")
    return "\n\n".join(found) + "\n"


def study_latex(verdict: StudyVerdict) -> str:
    """All tables in LaTeX, to be read by `\\input`."""
    return formats.latex_document(study_tables(verdict))


def print_study(verdict: StudyVerdict, file: TextIO | None = None) -> None:
    """Print the verdicts to `file` (standard output): by rich on a terminal, plain elsewhere."""
    stream = sys.stdout if file is None else file
    if (console := console_for(stream)) is not None:
        _print_rich(verdict, console)
        return
    found = [study_name(verdict), _head(verdict), "", formats.plain_text(_short(verdict)), ""]
    found += [formats.one_line(str(one)) for one in answers(verdict)]
    found += ["", *(f"{label}: {formats.one_line(text)}" for label, text in _doubts(verdict))]
    print("\n".join([*found, assumptions(verdict)]).rstrip("\n"), file=stream)


def _print_rich(verdict: StudyVerdict, console: Console) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = _short(verdict)
    table = RichTable(title=Text(study_name(verdict)), title_justify="left", caption=Text(_head(verdict)))
    for column in made.columns:
        table.add_column(Text(column.header), justify="left" if column.prose else "right")
    colours = {"moved": "green", "open": "yellow", "base": "bold", "": ""}
    for row in made.rows:
        # `Text` takes brackets as they are: an interval is no markup.
        cells = [Text(formats.one_line(cell.whole)) for cell in row.cells]
        cells[1].stylize(colours[row.mark])
        table.add_row(*cells)
    console.print(table)
    for one in answers(verdict):
        console.print(Text.assemble((formats.one_line(one.arm), "bold"), " ", formats.one_line(one.text)))
    for label, text in _doubts(verdict):
        console.print(Text.assemble((f"{label}: ", "yellow"), formats.one_line(text)))
    console.print(Text(assumptions(verdict), style="dim"))


def study_name(verdict: StudyVerdict) -> str:
    """What the study is called."""
    return str(verdict.study.plan.get("name") or verdict.study.path.name)


def assumptions(verdict: StudyVerdict) -> str:
    """What the verdicts take for granted, in words; empty where nothing is compared."""
    return verdict.comparison.priors() if verdict.comparison else ""


def _head(verdict: StudyVerdict) -> str:
    finished = sum(run.outcome == "finished" for run in verdict.study.runs)
    return (
        f"{counted(len(verdict.arms), 'arm')}, {finished} of {len(verdict.study.runs)} runs finished, "
        f"pass rates compared at {budget_text(verdict)}."
    )


def _short(verdict: StudyVerdict) -> Table:
    """The verdicts on one screen: what stands beside them is said in the answers."""
    return formats.without_beside(verdict_table(verdict).only(_IN_TERMINAL), "verdict")


def _doubts(verdict: StudyVerdict) -> list[tuple[str, str]]:
    cautions = [("caution", text) for text in verdict.cautions]
    return cautions + [("warning", text) for text in _warnings(verdict)]


def _warnings(verdict: StudyVerdict) -> list[str]:
    return [without_folders(text, verdict.study.path) for text in verdict.study.warnings]


def _content(verdict: StudyVerdict, folder: Path, figures: Sequence[StudyFigure]) -> dict[str, Any]:
    from scalerl.view.style import inline_svg

    links = []  # in the order of the table of runs
    for run in (run for arm in verdict.arms for run in arm.runs):
        target = verdict.study.path / run.run.plan.folder / "report.html"
        links.append(link(target, folder) if target.is_file() else "")
    return {
        "name": study_name(verdict),
        "head": _head(verdict),
        "answers": _grouped(answers(verdict)),
        "cautions": verdict.cautions,
        "warnings": _warnings(verdict),
        "tables": {table.name: table for table in study_tables(verdict)},
        "figures": {one.name: one for one in figures},
        "svg": {one.name: inline_svg(one.figure, one.name, one.title) for one in figures},
        "links": links,
        "plan": plan_rows(verdict),
        "assumptions": assumptions(verdict),
    }


def _grouped(found: Sequence[Answer]) -> list[tuple[str, str, list[Answer]]]:
    """Answers under the heading of their kind, in the order of `HEADINGS`; the base last."""
    grouped = sorted(HEADINGS.items(), key=lambda item: item[0] == "base")
    made = [(kind, heading, [one for one in found if one.kind == kind]) for kind, heading in grouped]
    return [(kind.replace(" ", "-"), heading, group) for kind, heading, group in made if group]
