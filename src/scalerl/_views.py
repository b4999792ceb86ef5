"""Views of results in a notebook or on axes of matplotlib.

A notebook calls a method of the result (`_repr_html_`), and users expect `Fit.plot`. But `scalerl.view` draws
results and imports their modules, so these must not import it. Results call the functions declared here
instead, and the package's `__init__.py`, above both, says which module has them.
"""

from collections.abc import Callable
from typing import Any, Protocol

Shown = Callable[[Any], str]


class Views(Protocol):
    """Functions that show results; the first argument of each is one result or several."""

    plot: Callable[..., Any]
    latex: Callable[[Any, float | None], str]
    run_html: Shown
    fit_html: Shown
    forecast_html: Shown
    comparison_html: Shown
    backtest_html: Shown


_source: list[Callable[[], Views]] = []


def shown_by(source: Callable[[], Views]) -> None:
    """Set the function that returns the views; it is called each time a result is shown."""
    _source[:] = [source]


def views() -> Views:
    """Return the functions that show results."""
    return _source[0]()
