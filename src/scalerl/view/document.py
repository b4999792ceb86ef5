"""A page: a sentence that answers, the chart, what to beware of, and sections of which most are folded.

One run, several, a foreign log and a study are all laid out by templates/page.html from a `Document`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl.view.assets import CHART, asset, page, script_json
from scalerl.view.table import Table

Pair = tuple[str, str]
"""A label, or a title, and a text."""


@dataclass(frozen=True)
class PagePart:
    """A part of a section: what it has of these is shown in this order."""

    title: str = ""
    text: str = ""
    rows: Sequence[Pair] = ()
    table: Table | None = None
    kind: str = ""
    """The class of the table."""
    links: Sequence[str] = ()
    """Where the first cell of each row leads."""
    items: Sequence[Pair] = ()
    """A list, its titles bold."""
    panels: Sequence[Mapping[str, Any]] = ()
    """Small multiples, drawn when they are unfolded: `scalerl.view.runs.panels`."""
    svg: str = ""
    note: str = ""

    @property
    def panels_json(self) -> str:
        """The panels for the script that draws them."""
        return script_json(self.panels)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is shown."""
        shown = (self.text, self.rows, self.table, self.items, self.panels, self.svg, self.note)
        return not any(shown)


@dataclass(frozen=True)
class PageSection:
    """A section, folded unless it is `open`; `columns` lays its parts out side by side."""

    title: str
    parts: Sequence[PagePart]
    open: bool = False
    columns: bool = False


@dataclass(frozen=True)
class Document:
    """All of a page."""

    kind: str
    name: str
    sentence: str
    """The answer, plainly."""
    sections: Sequence[PageSection]
    answers: Sequence[tuple[str, Sequence[Pair], str]] = ()
    """More answers: a heading, names with what is said of each, and a class of CSS."""
    verdict: str = ""
    """A class of CSS for the sentence."""
    facts: Sequence[Pair] = ()
    chart: Mapping[str, Any] | None = None
    """What `scalerl.view.runs.overlay.overlay` returns."""
    chart_note: str = ""
    cautions: Sequence[Pair] = ()
    """What a reader must know before any number, the most important first."""
    warnings: Sequence[Pair] = ()
    """By what or whom, and what; folded."""

    def html(self, linked: str = "") -> str:
        """The page as text, which loads nothing; `linked` is where a server has its files."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        sections = [
            (one, parts)
            for one in self.sections
            if (parts := [part for part in one.parts if not part.is_empty])
        ]
        more = {
            "sections": sections,
            "data": script_json(self.chart) if self.chart else "",
            "scripts": [
                (name, "" if linked else asset(name)) for name in (*CHART, *(["live.js"] if linked else []))
            ],
            "look": asset("chart.css"),
            "linked": linked,
        }
        return page("page.html", content | more)
