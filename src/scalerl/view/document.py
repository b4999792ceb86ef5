"""A page: the answer in a sentence, the chart, cautions, and sections of which most are folded.

One run, several runs, a foreign log and a study are each a `Document`. It can be rendered as HTML by
templates/page.html, as Markdown without drawings, and its tables as LaTeX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl.view import formats
from scalerl.view.assets import CHART, asset, page, script_json
from scalerl.view.table import Table, row

Pair = tuple[str, str]
"""A label, or a title, and a text."""


@dataclass(frozen=True)
class PagePart:
    """A part of a section; the fields that are set are shown in this order."""

    title: str = ""
    text: str = ""
    rows: Sequence[Pair] = ()
    table: Table | None = None
    upright: bool = False
    """Whether the page shows the only row of the table as pairs."""
    kind: str = ""
    """The class of the table."""
    links: Sequence[str] = ()
    """Link of the first cell of each row."""
    items: Sequence[Pair] = ()
    """A list, its titles bold."""
    panels: Sequence[Mapping[str, Any]] = ()
    """Small multiples, drawn when the section is unfolded: `scalerl.view.runs.panels`."""
    svg: str = ""
    note: str = ""

    @property
    def pairs(self) -> Sequence[Pair]:
        """The `rows`, or the headings and cells of an `upright` table without the first, the name."""
        if not self.upright or self.table is None:
            return self.rows
        cells = (cell.whole for cell in self.table.rows[0].cells)
        return [*zip(self.table.headers, cells, strict=True)][1:]

    def markdown(self) -> list[str]:
        """Return the blocks of this part in Markdown."""
        found = [f"### {formats.markdown_text(self.title)}"] if self.title else []
        found += [formats.markdown_text(self.text)] if self.text else []
        if self.rows:
            rows = tuple(row(*pair) for pair in self.rows)
            found.append(formats.markdown(Table("", "", ("", " "), rows, prose=("", " "))))
        found += [formats.markdown(self.table)] if self.table else []
        found += [formats.markdown_list(self.items)] if self.items else []
        return found + ([formats.markdown_text(self.note)] if self.note and (self.rows or self.items) else [])

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
    """The content of a page."""

    kind: str
    name: str
    sentence: str
    """The answer in plain words."""
    sections: Sequence[PageSection]
    answers: Sequence[tuple[str, Sequence[Pair], str]] = ()
    """More answers: a heading, pairs of a name and a text, and a class of CSS."""
    verdict: str = ""
    """A class of CSS for the sentence."""
    facts: Sequence[Pair] = ()
    chart: Mapping[str, Any] | None = None
    """The result of `scalerl.view.runs.overlay.overlay`."""
    chart_note: str = ""
    cautions: Sequence[Pair] = ()
    """Facts that a reader must know before any number, the most important first."""
    warnings: Sequence[Pair] = ()
    """Pairs of a source and a warning; shown folded."""

    @property
    def shown(self) -> list[tuple[PageSection, list[PagePart]]]:
        """The sections that are not empty, with their parts that are not empty."""
        kept = ((one, [part for part in one.parts if not part.is_empty]) for one in self.sections)
        return [(section, parts) for section, parts in kept if parts]

    def markdown(self) -> str:
        """Return the page without its drawings as Markdown."""
        found = [f"# {formats.markdown_text(self.name)}", formats.markdown_text(self.sentence)]
        for heading, items, _ in self.answers:
            found += [f"**{formats.markdown_text(heading)}**"] if heading else []
            found.append(formats.markdown_list(items))
        warnings = ((f"Warning {of}".strip() + ":", text) for of, text in self.warnings)
        if doubts := [*self.cautions, *warnings]:
            found += ["## Beware", formats.markdown_list(doubts)]
        for section, parts in self.shown:
            found.append(f"## {formats.markdown_text(section.title)}")
            found += [block for part in parts for block in part.markdown()]
        return "\n\n".join(found) + "\n"

    def latex(self) -> str:
        """Return all tables except those of dashes as LaTeX, for `\\input`."""
        tables = (part.table for _, parts in self.shown for part in parts if part.table is not None)
        return formats.latex_document(table for table in tables if not table.is_empty)

    def html(self, linked: str = "") -> str:
        """Return the page as self-contained HTML; `linked` is the address of the files on a server."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        more = {
            "sections": self.shown,
            "data": script_json(self.chart) if self.chart else "",
            "scripts": [
                (name, "" if linked else asset(name)) for name in (*CHART, *(["live.js"] if linked else []))
            ],
            "look": asset("chart.css"),
            "linked": linked,
        }
        return page("page.html", content | more)
