"""What tests in a browser share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def redrawn(page: Any) -> Iterator[None]:
    """Waits until what is done inside has been drawn in the chart."""
    page.evaluate("() => { delete document.getElementById('chart').dataset.drawn; }")
    yield
    page.wait_for_selector("#chart[data-drawn]")
