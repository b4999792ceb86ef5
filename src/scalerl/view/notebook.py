"""Results as HTML for a notebook: small tables with escaped texts, and the plot of a fit.

The HTML loads nothing and has no style sheet, as a notebook has its own for tables, light or dark.
"""

from collections.abc import Iterable, Sequence
from html import escape

from scalerl.curve.answers import Forecast, span
from scalerl.curve.result import Fit
from scalerl.forecast.backtest_result import COLUMNS, Backtest
from scalerl.forecast.comparison import Comparison
from scalerl.numbers import amount_text, plain, rate, unit_for
from scalerl.record.reader import RunRecord
from scalerl.view.facts.fit_rows import fit_rows
from scalerl.view.facts.notices import alarm_text
from scalerl.view.plotting import fit_svg, plot
from scalerl.view.runs.tables import latex

__all__ = ["backtest_html", "comparison_html", "fit_html", "forecast_html", "latex", "plot", "run_html"]


def fit_html(fit: Fit) -> str:
    """Return the plot of a fit, and the rows that `scalerl fit` prints."""
    return f"{fit_svg(fit)}{_pairs(fit_rows(fit))}{_notes(fit.warnings)}"


def forecast_html(forecast: Forecast) -> str:
    """Return a forecast with its intervals."""
    rows = [
        ("median", f"{forecast.median:.3f}"),
        ("curve", span(forecast.interval)),
        ("evaluation", span(forecast.prediction)),
        ("rerun", span(forecast.rerun)),
        ("least squares (paper)", f"{forecast.paper_point:.3f}"),
    ]
    return _pairs([(f"at {amount_text(forecast.axis, forecast.compute)}", ""), *rows])


def comparison_html(comparison: Comparison) -> str:
    """Return every pair as the rows that `scalerl compare` prints, and the assumptions."""
    tables = (_pairs(comparison.rows(pair)) for pair in comparison.pairs)
    return "".join(tables) + _notes([comparison.priors()])


def backtest_html(test: Backtest) -> str:
    """Return the scores of every cut, pooled over the runs."""
    found = _notes(test.heads())
    for fraction in test.fractions:
        found += _notes([test.outcomes(fraction)])
        for title, rows in test.tables(fraction):
            found += _table((title, *COLUMNS), [(label, *cells) for label, cells in rows])
    return found


def run_html(run: RunRecord) -> str:
    """Return a run's progress, cost and problems."""
    rows = [("run", run.name), ("evaluations", str(len(run.evals)))]
    if run.evals:
        first, last = run.evals[0], run.evals[-1]
        rows.append(("pass rate", f"{rate(first.pass_rate)} to {rate(last.pass_rate)} at step {last.step}"))
        for axis in run.logged_axes():
            largest = float(run.training_compute(axis).max())
            rows.append((axis.replace("_", " "), unit_for(axis, largest).show(largest)))
    if run.forecasts:
        rows.append(("forecasts on record", plain(len(run.forecasts))))
    if run.alarms:
        rows.append(("health", alarm_text(run.alarms)))
    return _pairs(rows) + _notes(run.warnings)


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of two columns, with the labels as headings."""
    cells = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    return f'<table style="text-align:left; white-space:pre-wrap">{"".join(cells)}</table>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a header; rows may be shorter."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    filled = ([*row, *[""] * (len(header) - len(row))] for row in rows)
    body = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in filled)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _notes(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in dict.fromkeys(texts))
