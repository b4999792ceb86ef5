"""A run on one page: the frozen forecast, its outcome, the fit, and the health of the training.

    write_report(run)     report.html, self-contained
    print_closing(run)    the closing table in a terminal

    facts/        the facts shown about a run, in numbers and words
    runs/         the page of one run, and of several; document.py lays out every page
    plotting.py   draws every figure, by matplotlib; runs/figures.py makes those for files
    terminal/     output in a terminal; serve/ the local server; templates/ and web/ the parts of pages

It may import `scalerl.record`, `scalerl.curve` and `scalerl.forecast`, serve/ also `scalerl.ingest`, but
nothing that trains. Imported by `cli`, `study`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.view.facts.facts import axis_for as axis_for
    from scalerl.view.facts.frozen import (
        FrozenForecast as FrozenForecast,
        Outcome as Outcome,
        frozen_forecasts as frozen_forecasts,
        judge as judge,
        leading_forecast as leading_forecast,
        main_forecast as main_forecast,
    )
    from scalerl.view.runs.page import report_html as report_html, write_report as write_report
    from scalerl.view.terminal.watch import closing_rows as closing_rows, print_closing as print_closing


lazy(__name__)
