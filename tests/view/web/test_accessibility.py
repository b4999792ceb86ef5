"""Pages by the rules of axe (WCAG), where it is installed: npm install axe-core, AXE=.../axe.min.js."""

import pytest
from browser_tools import needs_axe, serious


@needs_axe
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
@pytest.mark.parametrize("kind", ["run", "several", "study"])
def test_nothing_serious_keeps_anyone_from_reading_a_page(visit, pages, kind, width, scheme):
    assert serious(visit(pages[kind], width, scheme)) == []
