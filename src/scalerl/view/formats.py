"""A table (`scalerl.view.table`) as Markdown and LaTeX, and rows of numbers as CSV.

Names of arms, causes and warnings are somebody's text: each format escapes what it would take as its own.
"""

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scalerl.jsonl import flat
from scalerl.view.table import Cell, Table

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
    "±": r"$\pm$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    "’": "'",
}
_LONG = 30
"""Rows from which on a LaTeX table breaks over pages."""
_TEXT_WIDTH = 84
"""Letters that a line of an article has at \\footnotesize: 345 pt, of 4.1 pt each."""
_LONGEST_PROSE, _SHORTEST_HEAD = 18, 7
"""Letters at which words wrap in a LaTeX column, and at which a heading may."""
_SENTENCE = 40
"""Letters from which on a line beside words is a sentence."""
_EM = 0.5
"""Of a letter, about."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def markdown(table: Table) -> str:
    """A table of GitHub's Markdown, its note below."""
    marks = [":--" if header in table.prose else "--:" for header in table.headers]
    lines = [_markdown_row(table.headers), f"| {' | '.join(marks)} |"]
    lines += [_markdown_row([cell.whole for cell in row.cells]) for row in table.rows]
    return "\n\n".join(["\n".join(lines), *([markdown_text(table.note)] if table.note else [])])


def markdown_list(items: Iterable[tuple[str, str]]) -> str:
    """Items with their titles, which may be empty, in bold."""
    titled = ((f"**{markdown_text(title)}** " if title else "", text) for title, text in items)
    return "\n".join(f"- {title}{markdown_text(text)}" for title, text in titled)


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(markdown_text, texts))} |"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = re.sub(r"([\\`*_|~#])", r"\\\1", one_line(text)).replace("](", "]\\(")
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(table: Table) -> str:
    """The table with booktabs, in parts of as many columns as a page is wide; the first column is in each."""
    parts = _latex_parts(table)
    return "\n".join(_latex_part(table, columns, n, len(parts)) for n, columns in enumerate(parts))


def latex_document(tables: Iterable[Table]) -> str:
    """All tables, to be read by `\\input`."""
    return "\n".join(["% For the preamble: \\usepackage{booktabs,longtable}\n", *map(latex, tables)])


def _latex_parts(table: Table) -> list[list[int]]:
    """Places of the columns of each part, none wider than the text where two columns find room."""
    widths = [_latex_width(table, place) for place in range(len(table.headers))]
    parts: list[list[int]] = []
    for place in range(1, len(widths)):
        if parts and sum(widths[p] for p in (*parts[-1], place)) <= _TEXT_WIDTH:
            parts[-1].append(place)
        else:
            parts.append([0, place])
    return parts or [[0]]


def _latex_part(table: Table, places: list[int], number: int, of: int) -> str:
    shape = "".join(_latex_column(table, place) for place in places)
    head = " & ".join(_latex_head(table, place) for place in places) + r" \\"
    body = [
        " & ".join(_latex_cell(row.cells[place], _is_prose(table, place)) for place in places) + r" \\"
        for row in table.rows
    ]
    title = latex_text(table.title) + (f" ({number + 1} of {of})" if of > 1 else "")
    # A part that goes on is not explained again.
    note = latex_text(table.note) if number == 0 else ""
    caption = f"\\caption{{{title}. {note}}}".replace(". }", ".}")
    label = f"\\label{{tab:{table.name}{f'-{number + 1}' if number else ''}}}"
    if len(body) >= _LONG:
        lines = [
            "{\\footnotesize\\setlength{\\tabcolsep}{3pt}",
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
            "\\footnotesize\\setlength{\\tabcolsep}{3pt}",
            f"\\begin{{tabular}}{{{shape}}}",
            *("\\toprule", head, "\\midrule", *body, "\\bottomrule"),
            *("\\end{tabular}", "\\end{table*}"),
        ]
    return "\n".join(lines) + "\n"


def _is_prose(table: Table, place: int) -> bool:
    return table.headers[place] in table.prose


def _latex_lines(cell: Cell) -> list[str]:
    """A number, and below it what stands beside it."""
    return [cell.text, *cell.beside.splitlines()]


def _without_sentences(cell: Cell) -> Cell:
    """A cell of words without the sentences beside it: the page and Markdown have room for them."""
    return Cell(cell.text, "\n".join(line for line in cell.beside.splitlines() if len(line) <= _SENTENCE))


def _latex_content(table: Table, place: int) -> int:
    """Letters of the widest line of a column, its heading aside."""
    prose = _is_prose(table, place)
    cells = (row.cells[place] for row in table.rows)
    lines = (
        line for cell in cells for line in ([_without_sentences(cell).whole] if prose else _latex_lines(cell))
    )
    return max(map(len, lines), default=0)


def _latex_width(table: Table, place: int) -> int:
    """Letters of a column with its gap: as wide as its cells, or where these wrap; its heading wraps."""
    longest = _latex_content(table, place)
    most = _LONGEST_PROSE if _is_prose(table, place) else longest
    words = (len(word) for word in table.headers[place].split())
    return max(min(longest, most), *words, _SHORTEST_HEAD) + 2


def _latex_column(table: Table, place: int) -> str:
    # Prose that is long wraps; other words stand at the left, numbers at the right.
    if not _is_prose(table, place):
        return "r"
    wraps = _latex_content(table, place) > _LONGEST_PROSE
    return f"p{{{_LONGEST_PROSE * _EM:g}em}}" if wraps else "l"


def _latex_head(table: Table, place: int) -> str:
    width = _latex_width(table, place) - 2
    lines = textwrap.wrap(one_line(table.headers[place]), width, break_long_words=False)
    return _latex_stack([latex_text(line) for line in lines], "l" if _is_prose(table, place) else "r", "b")


def _latex_cell(cell: Cell, prose: bool) -> str:
    if prose:
        return latex_text(_without_sentences(cell).whole)
    first, *others = map(latex_text, _latex_lines(cell))
    return _latex_stack([first, *(f"{{\\scriptsize {line}}}" for line in others)], "r", "t")


def _latex_stack(lines: Sequence[str], side: str, place: str) -> str:
    """Lines over one another, as one cell."""
    if len(lines) < 2:
        return "".join(lines)
    rows = r" \\ ".join(lines)
    return f"\\begin{{tabular}}[{place}]{{@{{}}{side}@{{}}}}{rows}\\end{{tabular}}"


def latex_text(text: str) -> str:
    """Text that LaTeX sets as it is."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in one_line(text))
    return re.sub("-(?=-)", "-{}", escaped) if "--" in text else escaped


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Objects as lines, nested keys joined by dots, with all digits; what is not known is empty.

    An interval has two columns; another list is JSON. Text that a spreadsheet would run as a formula gets an
    apostrophe before it; numbers stay numbers.
    """
    lines = [flat(dict(_ends(flat(row)))) for row in rows]
    buffer = io.StringIO()
    keys = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(buffer, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv_value(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _ends(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Intervals as objects of their two ends."""
    for key, value in values.items():
        is_interval = isinstance(value, tuple | list) and [type(end) for end in value] == [float, float]
        yield key, dict(zip(("low", "high"), value, strict=True)) if is_interval else value


def _csv_value(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list | tuple):
        return json.dumps(value)
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(float(value)) if isinstance(value, float) else str(value)


def one_line(text: str) -> str:
    """Text without line breaks, and without what else controls a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
