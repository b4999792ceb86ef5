"""Views of results in a notebook or on axes of matplotlib.

A notebook calls a method of the result (`_repr_html_`), and users expect `Fit.plot`. But results must not
import `scalerl.view`, which draws them, as it imports them. So results call what is declared here, and the
package, above both, says which module has it.
"""

from collections.abc import Callable
from typing import Any, Protocol


class Views(Protocol):
    """The functions that show results, of which every first argument is the result."""

    def plot(
        self,
        fits: Any,
        *,
        log: bool = False,
        ax: Any = None,
        color: Any = None,
        label: str | None = None,
        ceiling: bool = True,
        forecast: Any = (),
        legend: bool = True,
    ) -> Any:
        """Draw fits on axes of matplotlib."""
        ...

    def latex(self, fits: Any, at: float | None = None) -> str:
        """Write a table of fits for a paper."""
        ...

    def run_html(self, run: Any) -> str:
        """Show a run."""
        ...

    def fit_html(self, fit: Any) -> str:
        """Show a fit."""
        ...

    def forecast_html(self, forecast: Any) -> str:
        """Show a forecast."""
        ...

    def comparison_html(self, comparison: Any) -> str:
        """Show a comparison."""
        ...

    def backtest_html(self, test: Any) -> str:
        """Show a backtest."""
        ...


_source: list[Callable[[], Views]] = []


def shown_by(source: Callable[[], Views]) -> None:
    """Set the function that returns what shows results; it is called when the first one is shown."""
    _source[:] = [source]


def views() -> Views:
    """Return what shows results."""
    return _source[0]()
