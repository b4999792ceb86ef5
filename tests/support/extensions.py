"""The files that the pages of docs/extend ask their reader to write."""

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "extend"
_FILE = re.compile(r"`(\w+\.py)`\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def extensions():
    """The pages by name, each with the name of its file and what is in it."""
    found = {page.stem: _FILE.search(page.read_text()) for page in sorted(PAGES.glob("*.md"))}
    return {name: (match[1], match[2]) for name, match in found.items() if match}


def write_extensions(folder):
    """Write all of them into a folder."""
    for name, code in extensions().values():
        (folder / name).write_text(code)
