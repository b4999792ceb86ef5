"""What tests in a browser share."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

POINTS = "() => document.querySelector('.sc-plot').data.filter((trace) => trace.meta)"
"""The traces of evaluations in a chart."""


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


_AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
_FOUND = """async () => (await axe.run()).violations
  .filter(({ impact }) => ["serious", "critical"].includes(impact))
  .map(({ id, nodes }) => [id, ...nodes.map((one) => one.html.slice(0, 120))])"""
needs_axe = pytest.mark.skipif(not _AXE.is_file(), reason="needs axe-core: npm install axe-core")


def serious(page: Any) -> list[list[str]]:
    """What axe (WCAG) calls serious or critical in a page, all of it unfolded."""
    page.wait_for_selector("#chart[data-drawn]")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(_AXE.read_text())
    return page.evaluate(_FOUND)
