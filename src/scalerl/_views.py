"""Views of results in a notebook or on axes of matplotlib.

A notebook calls a method of the result (`_repr_html_`), and users expect `Fit.plot`. But results must not
import `scalerl.view`, which draws them, as it imports them. So results call what is declared here, and the
package, above both, says which module has it.
"""

from collections.abc import Callable
from typing import Any, Protocol

Shown = Callable[[Any], str]


class Views(Protocol):
    """The functions that show results, of which every first argument is the result, or several."""

    plot: Callable[..., Any]
    latex: Callable[[Any, float | None], str]
    run_html: Shown
    fit_html: Shown
    forecast_html: Shown
    comparison_html: Shown
    backtest_html: Shown


_source: list[Callable[[], Views]] = []


def shown_by(source: Callable[[], Views]) -> None:
    """Set the function that returns what shows results; it is called when the first one is shown."""
    _source[:] = [source]


def views() -> Views:
    """Return what shows results."""
    return _source[0]()
