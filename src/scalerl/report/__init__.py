"""A run on one page: the forecast as frozen, what was measured, the fit, and the health of the training.

    write_report(run)     report.html, self-contained
    curve_figure(run, fit, frozen=..., out="curve.png")     the main figure as a file
    print_closing(run)    the closing table in a terminal

It reads the run folder alone, and never imports what trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.report.curve_figure import curve_figure, curve_svg
    from scalerl.report.curve_view import axis_for
    from scalerl.report.frozen import FrozenForecast, Outcome, frozen_forecasts, judge, main_forecast
    from scalerl.report.health_figure import health_svg
    from scalerl.report.page import report_html, write_report
    from scalerl.report.terminal import closing_rows, print_closing

__all__ = [
    "FrozenForecast",
    "Outcome",
    "axis_for",
    "closing_rows",
    "curve_figure",
    "curve_svg",
    "frozen_forecasts",
    "health_svg",
    "judge",
    "main_forecast",
    "print_closing",
    "report_html",
    "write_report",
]

lazy(
    __name__,
    {
        "curve_figure": "curve_figure curve_svg",
        "curve_view": "axis_for",
        "frozen": "FrozenForecast Outcome frozen_forecasts judge main_forecast",
        "health_figure": "health_svg",
        "page": "report_html write_report",
        "terminal": "closing_rows print_closing",
    },
)
