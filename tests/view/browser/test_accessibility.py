"""Pages by the rules of axe (WCAG), where it is installed: npm install axe-core, AXE=.../axe.min.js."""

import os
from pathlib import Path

import pytest

AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
FOUND = """async () => (await axe.run()).violations
  .filter(({ impact }) => ["serious", "critical"].includes(impact))
  .map(({ id, nodes }) => [id, ...nodes.map((one) => one.html.slice(0, 120))])"""


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install axe-core")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
@pytest.mark.parametrize("kind", ["run", "several", "study"])
def test_nothing_serious_keeps_anyone_from_reading_a_page(visit, pages, kind, width, scheme):
    page = visit(pages[kind], width, scheme)
    page.wait_for_selector("#chart[data-drawn]")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(AXE.read_text())
    assert page.evaluate(FOUND) == []
