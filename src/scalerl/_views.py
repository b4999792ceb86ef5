"""Views of results in a notebook or on axes of matplotlib.

A notebook calls a method of the result (`_repr_html_`), and users expect `Fit.plot`. But results must not
import `scalerl.view`, which draws them, as it imports them. So the package, above both, passes a function
that imports `scalerl.view.notebook` when it is first needed.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

_source: list[Callable[[], ModuleType]] = []


def shown_by(source: Callable[[], ModuleType]) -> None:
    """Set the function that returns the module whose functions show results."""
    _source[:] = [source]


def view(name: str, *args: Any, **options: Any) -> Any:
    """Call the function of this name in the view module."""
    return getattr(_source[0](), name)(*args, **options)
