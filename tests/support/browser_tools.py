"""What tests in a browser share."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium; where there is none, the tests that need it are skipped, and the summary says so."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("browser tests need Chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests need Playwright")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def redrawn(page: Any) -> Iterator[None]:
    """Waits until what is done inside has been drawn in the chart."""
    page.evaluate("() => { delete document.getElementById('chart').dataset.drawn; }")
    yield
    page.wait_for_selector("#chart[data-drawn]")
