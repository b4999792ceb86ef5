"""A table (`scalerl.view.table`) as Markdown and LaTeX, and rows of numbers as CSV.

Names of arms, causes and warnings are users' text: each format escapes its own special characters.
"""

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    '"': "''",
    "`": r"\textasciigrave{}",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    "’": "'",
}
_LONG = 30
"""Fewest rows of a LaTeX table that breaks over pages."""
_TEXT_WIDTH = 84
"""Letters in a line of an article at \\footnotesize: 345 pt, of 4.1 pt each."""
_LONGEST_PROSE, _SHORTEST_HEAD = 18, 7
"""Letters after which text wraps in a LaTeX column, and after which a heading may wrap."""
_SENTENCE = 40
"""A line beside words with more letters than this counts as a sentence."""
_EM = 0.5
"""Approximate width of a letter in em."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def markdown(table: Table) -> str:
    """Return a table in GitHub's Markdown, with its note below."""
    marks = [":--" if header in table.prose else "--:" for header in table.headers]
    lines = [_markdown_row(table.headers), f"| {' | '.join(marks)} |"]
    lines += [_markdown_row([cell.whole for cell in row.cells]) for row in table.rows]
    return "\n\n".join(["\n".join(lines), *([markdown_text(table.note)] if table.note else [])])


def markdown_list(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of items, with their titles (unless empty) in bold."""
    titled = ((f"**{markdown_text(title)}** " if title else "", text) for title, text in items)
    return "\n".join(f"- {title}{markdown_text(text)}" for title, text in titled)


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(markdown_text, texts))} |"


def markdown_text(text: str) -> str:
    """Escape text for Markdown."""
    escaped = re.sub(r"([\\`*_|~#])", r"\\\1", one_line(text)).replace("](", "]\\(")
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex_document(tables: Iterable[Table]) -> str:
    """Return all tables as LaTeX, for `\\input`."""
    preamble = "% For the preamble: \\usepackage{booktabs,longtable}; names in other scripts need LuaLaTeX"
    return "\n".join([f"{preamble}\n", *map(latex, tables)])


def latex(table: Table) -> str:
    """Return a table with booktabs, split into parts that fit on a page, each with the first column.

    If the table is too wide, text beside a number goes below it.
    """
    for below in (False, True):
        columns = [_latex_column(table, place, below) for place in range(len(table.headers))]
        if sum(column.width for column in columns) <= _TEXT_WIDTH:
            break
    first, *others = columns
    parts: list[list[_LatexColumn]] = []
    for column in others:
        if parts and sum(one.width for one in (*parts[-1], column)) <= _TEXT_WIDTH:
            parts[-1].append(column)
        else:
            parts.append([first, column])
    parts = parts or [[first]]
    return "\n".join(_latex_part(table, columns, n, len(parts)) for n, columns in enumerate(parts))


@dataclass(frozen=True)
class _LatexColumn:
    """A typeset column; its width is in letters, including the gap."""

    shape: str
    head: str
    cells: list[str]
    width: int


def _latex_column(table: Table, place: int, below: bool) -> _LatexColumn:
    """Typeset a column: words are left-aligned and wrap if long, numbers right-aligned; the heading wraps."""
    header = table.headers[place]
    prose = header in table.prose
    lines_R = [_latex_lines(row.cells[place], prose, below) for row in table.rows]
    longest = max((len(line) for lines in lines_R for line in lines), default=0)
    own = min(longest, _LONGEST_PROSE) if prose else longest
    width = max(own, *map(len, header.split()), _SHORTEST_HEAD)
    side = "l" if prose else "r"
    head = textwrap.wrap(one_line(header), width, break_long_words=False, break_on_hyphens=False)
    cells = []
    for first, *others in ([latex_text(line) for line in lines] for lines in lines_R):
        cells.append(_latex_stack([first, *(f"{{\\scriptsize {line}}}" for line in others)], "r", "t"))
    return _LatexColumn(
        shape=f"p{{{_LONGEST_PROSE * _EM:g}em}}" if prose and longest > _LONGEST_PROSE else side,
        head=_latex_stack([re.sub(r"\b[AB]\b", r"$\g<0>$", latex_text(line)) for line in head], side, "b"),
        cells=cells,
        width=width + 2,
    )


def _latex_lines(cell: Cell, prose: bool, below: bool) -> list[str]:
    """Return the lines of a cell: text beside a number on lines `below` it, or all on one line.

    A cell of words leaves sentences out; only the page and Markdown have room for these.
    """
    beside = cell.beside.splitlines()
    if not prose:
        return [cell.text, *beside] if below else [cell.whole]
    return [Cell(cell.text, "\n".join(line for line in beside if len(line) <= _SENTENCE)).whole]


def _latex_part(table: Table, columns: list[_LatexColumn], number: int, of: int) -> str:
    shape = "".join(column.shape for column in columns)
    # A narrow table takes one column of a two-column page.
    kind = "table*" if sum(column.width for column in columns) > _TEXT_WIDTH / 2 else "table"
    head = " & ".join(column.head for column in columns) + r" \\"
    body = [" & ".join(cells) + r" \\" for cells in zip(*(one.cells for one in columns), strict=True)]
    title = latex_text(table.title) + (f" ({number + 1} of {of})" if of > 1 else "")
    # Only the first part has the note.
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
            *(f"\\begin{{{kind}}}", "\\centering", caption + label),
            "\\footnotesize\\setlength{\\tabcolsep}{3pt}",
            f"\\begin{{tabular}}{{{shape}}}",
            *("\\toprule", head, "\\midrule", *body, "\\bottomrule"),
            *("\\end{tabular}", f"\\end{{{kind}}}"),
        ]
    return "\n".join(lines) + "\n"


def _latex_stack(lines: Sequence[str], side: str, place: str) -> str:
    """Stack lines in one cell."""
    if len(lines) < 2:
        return "".join(lines)
    rows = r" \\ ".join(lines)
    return f"\\begin{{tabular}}[{place}]{{@{{}}{side}@{{}}}}{rows}\\end{{tabular}}"


def latex_text(text: str) -> str:
    """Escape text for LaTeX."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in one_line(text))
    escaped = re.sub("-(?=-)", "-{}", escaped) if "--" in text else escaped
    escaped = re.sub(r"^[\[*]", r"{\g<0>}", escaped)  # after \\ it would start an optional argument
    return escaped.replace(r"C\_mid", r"$C_{\mathrm{mid}}$").replace(r"R\_0", "$R_0$")


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as lines of CSV: nested keys joined by dots, all digits, unknown values empty.

    An interval has two columns; any other list is JSON. Text that a spreadsheet would run as a formula gets
    an apostrophe before it; numbers stay numbers.
    """
    lines = [flat({key: _ends(value) for key, value in flat(row).items()}) for row in rows]
    buffer = io.StringIO()
    keys = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(buffer, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv_value(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _ends(value: Any) -> Any:
    """Turn an interval into an object of its two ends."""
    is_interval = isinstance(value, tuple | list) and [type(end) for end in value] == [float, float]
    return dict(zip(("low", "high"), value, strict=True)) if is_interval else value


def _csv_value(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list | tuple):
        return json.dumps(value)
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(float(value)) if isinstance(value, float) else str(value)


def one_line(text: str) -> str:
    """Replace line breaks and other control characters by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
