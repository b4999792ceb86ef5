"""The files of `scalerl/web`, which pages hold in themselves: the chart, its look, and what draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scalerl.jsonl import plain

WEB = Path(__file__).parent.parent / "web"
CHART = ("plotly-basic.min.js", "chart.js")
"""The scripts of a chart, in the order in which a page needs them; `chart.css` is their look."""


def asset(name: str) -> str:
    """The text of one file of the folder."""
    return (WEB / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """`data` as JSON that may stand inside of `<script type="application/json">`, whatever its texts hold."""
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
