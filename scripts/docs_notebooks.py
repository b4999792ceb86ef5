"""Convert the tutorials in docs/tutorials to notebooks in examples/runs, where their logs are.

    python scripts/docs_notebooks.py

Prose becomes Markdown cells; Python blocks and commands (`!scalerl ...`) become code cells. The output shown
on the page is left out, as the notebook produces its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TUTORIALS = ("forecast", "train")
_CODE = re.compile(
    r"(?P<not_run>^<!-- not run: .*? -->\n+(?:(?:^    .*\n)+|^```python\n.*?^```\n))"
    r"|(?P<commands>(?:^    scalerl [^\n]*\n)+)|^```python\n(?P<python>.*?)^```\n|^```\n.*?^```\n",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\(\.\./(?P<up>\.\./)?(?P<rest>[^)]*)\)")
_SIBLING = re.compile(r"\]\((?P<page>\w+\.md)")
FORMAT: dict[str, Any] = {"nbformat": 4, "nbformat_minor": 5}
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def notebook_of(name: str) -> Path:
    """Return the path of a tutorial's notebook."""
    return ROOT / "examples" / "runs" / f"{name}.ipynb"


def notebook(page: str) -> dict[str, Any]:
    """Return a page as a notebook without outputs."""
    cells, end = [], 0
    text = re.sub(r"^<!-- example: .* -->\n+", "", page, flags=re.MULTILINE)
    text = re.sub(r" The same as a\s+notebook:\s+\[\w+\.ipynb\]\([^)]*\)\.", "", text)
    text = re.sub(r"^    pip install", "    %pip install", text, flags=re.MULTILINE)
    for found in _CODE.finditer(text):
        if found["not_run"]:
            continue
        cells += markdown(text[end : found.start()])
        code = found["python"] or re.sub(r"^    ", "!", found["commands"] or "", flags=re.MULTILINE)
        if code:
            cells.append(cell("code", code, execution_count=None, outputs=[]))
        end = found.end()
    cells += markdown(text[end:])
    for number, one in enumerate(cells):
        one["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": KERNEL, **FORMAT}


def markdown(text: str) -> list[dict[str, Any]]:
    """Return a Markdown cell whose links are relative to examples/runs, or none for blank text."""
    text = re.sub(r"<!-- .* -->\n+", "", text)
    text = _SIBLING.sub(r"](../../docs/tutorials/\g<page>", text)
    text = _LINK.sub(lambda found: f"](../{'../' if found['up'] else '../docs/'}{found['rest']})", text)
    return [cell("markdown", text)] if text.strip() else []


def cell(kind: str, text: str, **more: Any) -> dict[str, Any]:
    """Return a notebook cell."""
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True), **more}


if __name__ == "__main__":
    for name in TUTORIALS:
        made = notebook((ROOT / "docs" / "tutorials" / f"{name}.md").read_text())
        notebook_of(name).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
        print(notebook_of(name))
