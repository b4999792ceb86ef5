"""How results are shown in a notebook or on axes of matplotlib.

A notebook asks the object itself (`_repr_html_`), and people look for a plot there (`Fit.plot`). But what
draws is `scalerl.view`, which is built on the results, and which these must not import. So the package
itself, above both, hands `scalerl.view.notebook` over as a function that imports it when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_source: list[Callable[[], ModuleType]] = []


def shown_by(source: Callable[[], ModuleType]) -> None:
    """Have `source()` return the module whose functions show results."""
    _source[:] = [source]


def view(name: str, *args: Any, **options: Any) -> Any:
    """Return what the view of this name makes of a result."""
    return getattr(_source[0](), name)(*args, **options)
