"""The page of one run or several: its content is gathered here, and laid out by `scalerl.view.document`.

write_report(run)       report.html in the folder of one run
runs_document(view)     the page of one run or several
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError
from scalerl.numbers import as_mapping, axis_name, percent, rate
from scalerl.record.reader import RunRecord
from scalerl.view.assets import write_text
from scalerl.view.document import Document, PagePart, PageSection, Pair
from scalerl.view.facts.facts import axis_for, head, known_ceiling, notes
from scalerl.view.facts.frozen import leading_forecast
from scalerl.view.facts.notices import alarm_notices, notices, sentence
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.answer import MOST, and_more, answers_of, sentence_of
from scalerl.view.runs.details import run_sections
from scalerl.view.runs.gathered import RunsView, assumptions, taken, warnings_of
from scalerl.view.runs.groups import grouped
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.tables import runs_tables


def write_report(run: RunRecord | str | Path, out: Path | None = None, *, level: float = 0.95) -> Path:
    """Write the page of one run atomically, and return its path.

    Args:
        run: the record, or the path of its folder.
        out: the file to write; defaults to report.html in the run folder.
        level: level of the intervals.

    Raises:
        InputError: the folder cannot be read, or the counters behind the compute axis are missing.
        CannotAnswerError: the run has no evaluation.
        WriteError: the page cannot be written.
    """
    record = run if isinstance(run, RunRecord) else RunRecord.read(run)
    return write_text(out or record.path / "report.html", report_html(record, level=level))


def report_html(run: RunRecord, fit: Fit | None = None, *, level: float = 0.95) -> str:
    """Return the page of one run as text, equal for equal input; `level` is for a fit made here.

    Raises:
        CannotAnswerError: the run holds no evaluation.
    """
    if not run.evals:
        raise CannotAnswerError(f"{run.evals_file}: no evaluation yet, so there is nothing to report")
    axis = axis_for(run, fit, leading_forecast(run))
    shown = ShownRun(run.name, Points.from_record(run, axis), run, fit)
    shown = shown.fitted_with(level=level) if fit is None else shown
    return runs_document(RunsView((shown,), level)).html()


def runs_document(view: RunsView) -> Document:
    """Return the page of one run or several."""
    alone = view.runs[0] if len(view.runs) == 1 else None
    chart = overlay(
        view.runs, budget=view.budget, target=view.target, groups=view.recipe_groups, tasks=view.tasks
    )
    # The sentence gives the outcome of the leading forecast: inside, outside, not-measured.
    frozen = alone.frozen if alone and view.budget is None else None
    took = [(run.name, text) for run in view.runs if (text := taken(run))]
    granted = (
        PagePart(items=[("", text) for text in assumptions(view)]),
        PagePart("What was taken for what in the logs of other trainers", items=took),
    )
    return Document(
        kind="Reinforcement learning run" if alone else "Reinforcement learning runs, compared",
        name=view.title,
        sentence=sentence_of(view),
        answers=answers_of(view),
        verdict=alone.outcome(frozen).word.replace(" ", "-") if alone and frozen else "",
        facts=_facts(view),
        chart=chart,
        chart_note=_chart_note(view, chart),
        cautions=_cautions(view),
        warnings=_warnings(view),
        sections=[
            *_tables(view),
            *(run_sections(alone, view.end) if alone else ()),
            PageSection("What is taken for granted", granted),
        ],
    )


def _facts(view: RunsView) -> list[Pair]:
    if len(view.runs) == 1 and (record := view.runs[0].record) is not None:
        rows, fit = head(record, view.axis), view.runs[0].fit
        if view.max_compute < math.inf and fit is not None:
            rows.append(("fitted", f"{fit.n_points} evaluations, up to {view.unit.show(view.spent)}"))
        return rows
    found = [
        ("metric", "; ".join(map(str, view.metrics))),
        ("runs", f"{len(view.runs)}"),
        ("evaluations", f"{sum(len(run.used) for run in view.runs):,}"),
        ("compute axis", axis_name(view.axis)),
        ("intervals", percent(view.level)),
    ]
    if view.budget is not None:
        found.append(("budget", view.unit.show(view.budget)))
    if view.target is not None:
        found.append(("target", rate(view.target)))
    return found


def _chart_note(view: RunsView, chart: Mapping[str, Any]) -> str:
    """Return a note that explains exactly the signs in the chart."""
    runs = chart["runs"][: len(view.runs)]  # tasks of a mixture come after
    fits = [run["fit"] for run in runs if run["fit"] is not None]
    bars = any(noise is not None for run in runs for noise in run["noise"])
    hollow = any(run["fit"] is not None and not all(run["used"]) for run in runs)
    said = [
        f"Points are evaluations{', their bars one standard deviation of the sampling noise' if bars else ''}"
        f"{'; hollow: not part of the fit' if hollow else ''}."
    ]
    if any(fit["curve"] is not None for fit in fits):
        said.append(
            "Line and band: the median of the mean curve, as the table forecasts it, and its interval; thin "
            "where no evaluation has been."
        )
    if any(fit["A"] is not None for fit in fits):
        said.append("At the right edge: the ceiling A with its interval.")
    if any(forecast["interval"] is not None for run in runs for forecast in run["forecasts"]):
        said.append("Bar with caps: a forecast as it was frozen, for one evaluation at its target.")
    if len(runs) == 1 and fits:
        said.append("Shaded: what the curve was fitted to.")
    if view.tasks:
        said.append("Thin and labelled: the tasks of the mixture, each with its own fit.")
    record = view.runs[0].record if len(view.runs) == 1 else None
    known = record.config.get("ceiling") if record is not None and not record.task else None
    if why := as_mapping(known).get("why"):
        said.append(f"Dotted: the ceiling {rate(known_ceiling(record))} that was known beforehand ({why}).")
    return " ".join(said)


def _cautions(view: RunsView) -> list[Pair]:
    """Return the facts that a reader must know before any number, at most a few of many runs."""
    found: list[Pair] = []
    for group in view.recipe_groups:
        seeds = group.fits
        for run in group.runs:
            if run.fit is not None and not any(run.fit is fit for fit in seeds):
                text = f"Its evaluations are those of another run of {group.name}: it is no further seed."
                found.append((f"{run.name}: A copy.", text))
    for run in view.runs:
        name = "" if len(view.runs) == 1 else f"{run.name}: "
        said = alarm_notices(run.record.alarms) if run.record is not None else []
        if run.fit is not None:
            said = said + notices(run.fit, run.part)
        elif name:
            said = [*said, ("No curve.", sentence(run.reason))]
        found += [(f"{name}{title}", text) for title, text in said]
    return [*found[:MOST], *and_more(len(found), "remarks")]


def _warnings(view: RunsView) -> list[Pair]:
    """Return the warnings of reading and fitting, each once, with the names of its runs."""
    said = []
    for run in view.runs:
        misfit = run.fit.misfit.why if run.fit is not None and run.fit.misfit else None
        found = warnings_of(run)
        if run.record is not None:
            found += [run.local(one) for one in notes(run.record)]
        if len(view.runs) == 1 and run.frozen:
            found += map(str, run.frozen.fit.get("warnings") or ())
        unsaid = (one for one in dict.fromkeys(found) if misfit is None or misfit not in one)
        said += [(run.name, one) for one in unsaid]
    several = len(view.runs) > 1
    named = [(", ".join(names) if several else "", text) for text, names in grouped(said).items()]
    return [*(("", text) for text in (*view.left_out, *view.uncompared, *view.beyond)), *named]


def _tables(view: RunsView) -> list[PageSection]:
    shown = []
    for table in runs_tables(view):
        if table.name == "health" and len(view.runs) == 1 and view.runs[0].record is not None:
            continue  # it has a section of its own
        alone = table.name == "curves" and len(table.rows) == 1
        part = PagePart(table=table, kind=table.name, upright=alone)
        seeds = {name: [run.name for run in runs] for name, runs in view.recipes.items() if len(runs) > 1}
        items = [(name, ", ".join(names)) for name, names in seeds.items()]
        more = (PagePart("Runs of one recipe", items=items),) if table.name == "comparison" else ()
        opens = table.name in ("curves", "comparison", "tasks")
        title = "The run so far, and its forecast" if alone else table.title
        shown.append(PageSection(title, (part, *more), open=opens))
    if view.comparison is None and len(view.runs) > 1:
        shown.insert(1, PageSection("Comparison", (PagePart(text=view.not_compared),), open=True))
    return shown
