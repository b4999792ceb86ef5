"""How much of a file is read: the one place with the limits of all readers.

Every reader takes time and memory in proportion to its file. What a format can say in few bytes (a name that
is repeated below a long one, an empty table in JSON, a text that a dictionary repeats) would take hundreds of
times as many in memory; these limits bound that, at far more than any log has that a trainer wrote. Whatever
is within them takes less than 1 GB, and seconds but for large files, of which some
10 MB are read a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalerl.errors import InputError


@dataclass(frozen=True)
class Limit:
    """The most of something that is read, and what to do where there is more."""

    most: int
    what: str
    advice: str

    def check(self, found: float, where: str | Path) -> None:
        """Raise an InputError that names the limit, what was found and what to do, if there is more."""
        if found > self.most:
            raise InputError(
                f"{where}: {found:,.0f} {self.what}, and the limit is {self.most:,}: {self.advice}"
            )


ROW = Limit(2**24, "bytes in one line or row", "log numbers, and keep texts and media elsewhere")
"""Samples of completions are a few MB at most."""
WHOLE = Limit(2**28, "bytes in a file that is read whole", "log every tenth step, or split the file by runs")
"""JSON documents, tables of points, and the files of a run folder. JSONL, CSV and binary logs are read row by
row and have no such limit."""
JSON = Limit(
    600_000_000,
    "bytes of memory for the values of one JSON text",
    "log fewer values, or a row per step as JSONL",
)
DEPTH = Limit(100, "levels of nesting", "log metrics by flat names such as eval/accuracy")
KEYS = Limit(200_000, "values in one row", "log fewer metrics")
NAMES = Limit(
    2**25, "characters in the names of one row, their parents' before each", "shorten the outer names"
)
NAME = Limit(1000, "characters in a name", "shorten it")
"""Of a metric or a run. Patterns of names are searched in time that grows with the third power of this."""
COLUMNS = Limit(50_000, "metrics that could be of use, of all runs together", "export fewer metrics or runs")
TABLE_COLUMNS = Limit(20_000, "columns", "export fewer of them")
TABLE_ROWS = Limit(1_000_000, "rows", "keep every tenth row, or split the table by runs")
"""Of a compressed table, which may have any number of rows in a few bytes; a million take some 10 s."""
RUNS = Limit(1000, "runs", "choose one (--run), or a folder with fewer of them")
"""That are read at once; those that are not asked for do not count."""
FOUND = Limit(20_000, "runs in one file or folder", "split it")
VALUES = Limit(6_000_000, "values of metrics that could be of use", "log every tenth step")
"""At 130 bytes each while a log of one metric is put in order: 3 million took 440 MB. With several metrics a
row they take fewer."""
EVALUATIONS = Limit(200_000, "evaluations", "read fewer runs at once, or keep every tenth row")
"""Of all runs together, and rows of a table of points."""
TOML = Limit(2**20, "bytes in a recipe or a study", "write less, or put what is long into files")
TEXT = Limit(2**28, "bytes of decoded text in one column", "leave that column out, or shorten its texts")

_SMALL_JSON = 2**20  # what this takes at its worst is 100 MB
_PER_TABLE, _PER_LIST, _PER_VALUE = 240, 90, 100


def check_json(data: bytes, where: str | Path) -> None:
    """Raise an InputError if the objects of a JSON text would take more memory than `JSON` allows.

    What the parser makes of a text is bounded before it is made, by the characters that begin an object, a
    list or another value of one: in CPython an empty dict takes 64 bytes, one with a key 184 to 232, a list
    56 to 88, and a float with its place in a dict some 100. Commas and brackets within texts count too, which
    only lowers the bound. A text with one character beyond Latin-1 has up to four bytes for each.
    """
    if len(data) <= _SMALL_JSON:
        return
    width = 1 if data.isascii() else 4
    objects = _PER_TABLE * data.count(b"{") + _PER_LIST * data.count(b"[") + _PER_VALUE * data.count(b",")
    JSON.check(width * len(data) + objects, where)
