"""How results show themselves to a person in a notebook or on axes of matplotlib.

A notebook asks the object itself (`_repr_html_`), and people look for a plot there (`Fit.plot`). But what
draws is `scalerl.view`, which is made on top of the results, and which these must not import. So they ask
here, by name, when somebody looks; everything else points one way.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VIEWS = {
    "plot_fit": "scalerl.view.figures.fit_plot",
    "fit_html": "scalerl.view.notebook",
    "forecast_html": "scalerl.view.notebook",
    "comparison_html": "scalerl.view.notebook",
    "backtest_html": "scalerl.view.notebook",
    "run_html": "scalerl.view.notebook",
}
"""The views, and the module of each."""


def view(name: str, *args: Any, **options: Any) -> Any:
    """What the view of this name makes of a result."""
    return getattr(import_module(VIEWS[name]), name)(*args, **options)
