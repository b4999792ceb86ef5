"""Source and docs use the field's words: one word for one thing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for folder, ends in (("src", "*.py"), ("src", "*.toml"), ("docs", "*.md"))
    for path in sorted((ROOT / folder).rglob(ends))
]
AVOIDED = {
    r"neighbours correlated [\d{]": "autocorrelation",
    r"install_(seconds|weights)|weights\.install\b": "weight update, load",
    r"hand-?overs?\b|hand_over|handed over in": "weight sync",
    r"weights of the day": "latest weights",
    r"decode\.row\b|decode_row": "decode slot",
    r"\b_?paces?\b|_Pace\b": "throughput, seconds per unit",
    r"compute_to_tell|\bwould tell\b|\b(can|cannot|not) (be )?told\b": "identify, detect",
    r"\btold( = |\)|: )": "a name that says what it holds",
    r"signs? of life": "heartbeat",
    r"\b[Ss]omebody\b|\b[Nn]obody\b": "the process by its role",
    r"\bhomeless\b|\bburied\b": "unassigned, lost",
}


@pytest.mark.parametrize("pattern", AVOIDED)
def test_words_that_another_word_replaces_are_not_used(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for path in FILES
        for text in [path.read_text(encoding="utf-8")]
        for match in re.finditer(pattern, text)
    ]
    assert not found, f"use {AVOIDED[pattern]}: {found}"
