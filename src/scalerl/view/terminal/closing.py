"""The closing table of a run: what was forecast, what was measured, and the ceiling, on one screen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scalerl.record.reader import RunRecord
from scalerl.tty import console_for
from scalerl.view.facts.alarm_rows import alarm_text
from scalerl.view.facts.ceiling import ceiling_text, to_tell_text
from scalerl.view.facts.curve_view import axis_for, known_ceiling
from scalerl.view.facts.frozen import FrozenForecast, frozen_forecasts, judge, main_forecast
from scalerl.view.numbers import percent, rate, rate_interval, unit_for

if TYPE_CHECKING:
    from rich.console import Console


def closing_rows(run: RunRecord, report: Path | None = None) -> list[tuple[str, str]]:
    """The rows (label, value) of the closing table; `report` is the page."""
    frozen = main_forecast(frozen_forecasts(run))
    rows = _forecast_rows(run, frozen) if frozen else _measured_rows(run)
    fit_json = frozen.fit if frozen else {}
    when = f" at {percent(frozen.share)}" if frozen else ""
    rows.append((f"ceiling A{when}", ceiling_text(fit_json, known_ceiling(run))))
    if fit_json.get("lack_of_fit"):
        rows.append(("why withheld", str(fit_json.get("why"))))
    rows += _to_tell_rows(run, fit_json, axis_for(run, frozen=frozen))
    if run.alarms:
        rows.append(("health", alarm_text(run.alarms)))
    if report is not None:
        rows.append(("report", str(report)))
    return rows


def _forecast_rows(run: RunRecord, frozen: FrozenForecast) -> list[tuple[str, str]]:
    outcome = judge(run, frozen)
    stated = f"{rate(frozen.mean)} {rate_interval(frozen.prediction)}"
    if outcome.measured is None:
        measured = f"not yet: the run stands at {percent(outcome.progress)} of the target"
    else:
        measured = f"{rate(outcome.measured.pass_rate)}: {outcome.word}"
    return [
        ("forecast", f"{stated}, at {frozen.share_in_words}"),
        ("measured", measured),
        ("width", rate(frozen.width)),
        *([("another seed", rate_interval(frozen.rerun))] if math.isfinite(sum(frozen.rerun)) else []),
    ]


def _to_tell_rows(run: RunRecord, fit_json: Mapping[str, Any], axis: str) -> list[tuple[str, str]]:
    spent = float(run.compute(axis).max(initial=0.0))
    text = to_tell_text(fit_json, unit_for(axis, spent))
    return [("to tell it", text)] if text else []


def _measured_rows(run: RunRecord) -> list[tuple[str, str]]:
    last = run.evals[-1] if run.evals else None
    measured = f"{rate(last.pass_rate)} at step {last.step}" if last else "no evaluation yet"
    return [("forecast", "none was frozen during the run"), ("measured", measured)]


def print_closing(run: RunRecord, report: Path | None = None, file: TextIO | None = None) -> None:
    """Print the closing table to `file` (standard output): by rich on a terminal, plain elsewhere."""
    stream = sys.stdout if file is None else file
    rows = closing_rows(run, report)
    name = run.name
    if (console := console_for(stream)) is not None:
        _print_rich(name, rows, console)
        return
    width = max(len(label) for label, _ in rows)
    print(name, *(f"  {label:<{width}}  {value}" for label, value in rows), sep="\n", file=stream)


def _print_rich(name: str, rows: list[tuple[str, str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(name), title_justify="left", show_header=False)
    for label, value in rows:
        # `Text` takes brackets as they are: an interval is no markup.
        colour = "green" if value.endswith(": inside") else "red" if value.endswith(": outside") else ""
        table.add_row(Text(label, style="dim"), Text(value, style=colour))
    console.print(table)
