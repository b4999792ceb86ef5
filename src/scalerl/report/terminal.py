"""The closing table of a run: what was forecast, what was measured, and the ceiling, on one screen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scalerl.record import RunRecord
from scalerl.report.curve_view import known_ceiling
from scalerl.report.frozen import frozen_forecasts, judge, main_forecast
from scalerl.report.numbers import as_float, pair, percent, rate, rate_interval

if TYPE_CHECKING:
    from scalerl.curve import Fit


def closing_rows(run: RunRecord, fit: Fit | None = None, report: Path | None = None) -> list[tuple[str, str]]:
    """The rows (label, value) of the closing table.

    `fit` is a fit on the whole run: its ceiling takes the place of the forecast's. `report` is the page.
    """
    frozen = main_forecast(frozen_forecasts(run))
    rows: list[tuple[str, str]] = []
    if frozen is None:
        rows.append(("forecast", "none was frozen during the run"))
        rows.append(("measured", f"{rate(run.evals[-1].pass_rate)} at step {run.evals[-1].step}" if run.evals else "–"))
    else:
        outcome = judge(run, frozen)
        interval = f"{rate(frozen.mean)} {rate_interval(frozen.prediction)}"
        rows.append(("forecast", f"{interval}, at {frozen.share_in_words}"))
        if outcome.measured is None:
            rows.append(("measured", f"not yet: the run stands at {percent(outcome.progress)} of the target"))
        else:
            rows.append(("measured", f"{rate(outcome.measured.pass_rate)}: {outcome.word}"))
        rows.append(("width", rate(frozen.width)))
    fit_json = fit.to_json() if fit is not None else (frozen.fit if frozen else {})
    rows.append(("ceiling A", ceiling_text(fit_json, known_ceiling(run))))
    if report is not None:
        rows.append(("report", str(report)))
    return rows


def ceiling_text(fit_json: Mapping[str, Any], known: float) -> str:
    """A with its interval, against the ceiling known beforehand where there is one."""
    A = as_float((fit_json.get("fit") or {}).get("A"))
    lo, hi = pair((fit_json.get("intervals") or {}).get("A"))
    if not math.isfinite(A):
        text = "not fitted"
    else:
        text = f"{rate(A)} {rate_interval((lo, hi))}" + ("" if fit_json.get("identified", True) else ", not identified")
    if not math.isfinite(known):
        return text
    inside = "inside" if lo <= known <= hi else "outside"
    return f"{text}; known beforehand {rate(known)}" + (f": {inside}" if math.isfinite(lo + hi) else "")


def print_closing(
    run: RunRecord, fit: Fit | None = None, report: Path | None = None, file: TextIO | None = None
) -> None:
    """Print the closing table to `file` (standard output): with rich on a terminal, as plain text elsewhere."""
    file = file or sys.stdout
    rows = closing_rows(run, fit, report)
    name = str(run.config.get("name") or run.path.name)
    if file.isatty():
        _print_rich(name, rows, file)
        return
    width = max(len(label) for label, _ in rows)
    print(name, *(f"  {label:<{width}}  {value}" for label, value in rows), sep="\n", file=file)


def _print_rich(name: str, rows: list[tuple[str, str]], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(name), title_justify="left", show_header=False)
    for label, value in rows:
        # `Text` takes brackets as they are: an interval is no markup.
        colour = "green" if value.endswith(": inside") else "red" if value.endswith(": outside") else ""
        table.add_row(Text(label, style="dim"), Text(value, style=colour))
    Console(file=file).print(table)
