"""The files that the pages of docs/extend ask their reader to write."""

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "extend"
_FILE = re.compile(r"`(\w+\.py)`\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL = [
    "context.prompt=8",
    "context.thinking=4",
    "length.low=3",
    "length.high=4",
    "batch.prompts=2",
    "batch.samples=8",
    "decode_slots=32",
    "budget.kind=steps",
    "budget.amount=3",
    "evaluation.count=1",
    "evaluation.samples=1",
    "checkpoint.steps=1",
    "curriculum.kind=uniform",
    "optimiser.warmup_steps=1",
]
"""What makes a run of the demonstration's recipe small."""
OWN = [
    "loss.kind=losses.py:Topr",
    "loss.max_ratio=0.9",
    "advantage.kind=advantages.py:SoftStd",
    "task.kind=tasks.py:Sums",
    "task.heldout=5",
    "task.width=6",
]
"""What is set in a recipe by kinds of the pages; the last three are of the task."""


def extensions():
    """The pages by name, each with the name of its file and what is in it."""
    found = {page.stem: _FILE.search(page.read_text()) for page in sorted(PAGES.glob("*.md"))}
    return {name: (match[1], match[2]) for name, match in found.items() if match}


def write_extensions(folder):
    """Write all of them into a folder."""
    for name, code in extensions().values():
        (folder / name).write_text(code)
