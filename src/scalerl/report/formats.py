"""A table (`scalerl.report.table`) as Markdown, LaTeX, CSV and plain text.

Names of arms, causes and warnings are somebody's text: each format escapes what it would take as its own.
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from scalerl.report.table import Column, Raw, Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ it would begin an optional argument, and so would a star
    "]": "{]}",
    "*": "{*}",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    "’": "'",
}
_LONG = 30
"""Rows from which on a LaTeX table breaks over pages."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_WIDEST = 60
"""Characters at which prose wraps in a terminal."""


def markdown(table: Table) -> str:
    """A table of GitHub's Markdown under a heading, its note below."""
    marks = [":--" if column.prose else "--:" for column in table.columns]
    lines = [_markdown_row([column.header for column in table.columns]), f"| {' | '.join(marks)} |"]
    lines += [_markdown_row([cell.whole for cell in row.cells]) for row in table.rows]
    parts = [f"## {markdown_text(table.title)}", "\n".join(lines)]
    return "\n\n".join([*parts, *([markdown_text(table.note)] if table.note else [])]) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(markdown_text, texts))} |"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = re.sub(r"([\\`*_|~#])", r"\\\1", one_line(text)).replace("](", "]\\(")
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(table: Table) -> str:
    """A table with booktabs: as wide as the page, or over several of them where it is long."""
    shape = "".join(_latex_column(table, place) for place in range(len(table.columns)))
    head = " & ".join(latex_text(column.header) for column in table.columns) + r" \\"
    body = [" & ".join(latex_text(cell.whole) for cell in row.cells) + r" \\" for row in table.rows]
    caption = f"\\caption{{{latex_text(table.title)}. {latex_text(table.note)}}}".replace(". }", ".}")
    label = f"\\label{{tab:{table.name}}}"
    if len(body) >= _LONG:
        lines = [
            "{\\footnotesize",
            f"\\begin{{longtable}}{{{shape}}}",
            f"{caption}{label}\\\\",
            *("\\toprule", head, "\\midrule", "\\endfirsthead"),
            *("\\toprule", head, "\\midrule", "\\endhead"),
            *("\\bottomrule", "\\endfoot"),
            *body,
            *("\\end{longtable}", "}"),
        ]
    else:
        lines = [
            *("\\begin{table*}", "\\centering", caption + label),
            "\\resizebox{\\textwidth}{!}{%",
            f"\\begin{{tabular}}{{{shape}}}",
            *("\\toprule", head, "\\midrule", *body, "\\bottomrule"),
            *("\\end{tabular}}", "\\end{table*}"),
        ]
    return "\n".join(lines) + "\n"


LATEX_HEAD = "% For the preamble: \\usepackage{booktabs,graphicx,longtable}\n"


def _latex_column(table: Table, place: int) -> str:
    """Prose that is long wraps; other words stand at the left, numbers at the right."""
    longest = max((len(row.cells[place].whole) for row in table.rows), default=0)
    if not table.columns[place].prose:
        return "r"
    return "l" if longest <= 32 else "p{6cm}"


def latex_text(text: str) -> str:
    """Text that LaTeX sets as it is."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in one_line(text))
    return re.sub("-(?=-)", "-{}", escaped) if "--" in text else escaped


def csv_text(keys: Sequence[str], rows: Sequence[Sequence[Raw]]) -> str:
    """Raw values with all of their digits; what is not known is empty.

    Text that a spreadsheet would run as a formula gets an apostrophe before it; numbers stay numbers.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([[_csv_value(value) for value in row] for row in rows])
    return buffer.getvalue()


def _csv_value(value: Raw) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(float(value)) if isinstance(value, float) else str(value)


def plain_text(table: Table) -> str:
    """A table for a pipe: columns apart by two spaces, long prose wrapped."""
    texts = [[_wrapped(cell.whole) for cell in row.cells] for row in table.rows]
    heads = [textwrap.wrap(column.header, 16) for column in table.columns]
    widths = [
        max(len(line) for cell in (head, *(row[place] for row in texts)) for line in cell)
        for place, head in enumerate(heads)
    ]
    lines = _aligned(heads, widths, table.columns)
    lines.append("  ".join("-" * width for width in widths))
    for cells in texts:
        lines += _aligned(cells, widths, table.columns)
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(one_line(text), _WIDEST) or [""]


def _aligned(cells: Sequence[list[str]], widths: Sequence[int], columns: Sequence[Column]) -> list[str]:
    lines = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        aligned = [
            part.ljust(width) if column.prose else part.rjust(width)
            for part, width, column in zip(parts, widths, columns, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def without_beside(table: Table, key: str) -> Table:
    """The table with the text alone in the column whose first key this is."""
    place = next(place for place, column in enumerate(table.columns) if column.keys[0] == key)
    rows = [
        replace(row, cells=tuple(replace(c, beside="") if n == place else c for n, c in enumerate(row.cells)))
        for row in table.rows
    ]
    return replace(table, rows=tuple(rows))


def joined(first: Table, second: Table) -> tuple[list[str], list[list[Raw]]]:
    """Keys and raw rows of two tables with one row per arm each, side by side; the arm stands once."""
    rows = [[*left, *right[1:]] for left, right in zip(first.raw_rows(), second.raw_rows(), strict=True)]
    return [*first.keys, *second.keys[1:]], rows


def one_line(text: str) -> str:
    """Text without line breaks, and without what else controls a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
