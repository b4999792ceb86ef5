"""The limits of all readers.

Every reader takes time and memory in proportion to its file. But in some formats a few bytes expand to
hundreds of times as many in memory (a long name repeated before every key below it, an empty table in JSON, a
text repeated by a dictionary). These limits bound that, far above any real training log. Within them a reader
takes less than 1 GB and a few seconds; of large files it reads about 10 MB a second.
"""

from dataclasses import dataclass
from pathlib import Path

from scalerl.errors import InputError


@dataclass(frozen=True)
class Limit:
    """The largest amount of something that a reader accepts, and advice if there is more."""

    most: int
    what: str
    advice: str

    def check(self, found: float, where: str | Path) -> None:
        """Raise an InputError with the amount, the limit and the advice if the amount exceeds the limit."""
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
"""Longest name of a metric or a run; the time to match patterns grows with the third power of this."""
COLUMNS = Limit(50_000, "metrics that could be of use, of all runs together", "export fewer metrics or runs")
TABLE_COLUMNS = Limit(20_000, "columns", "export fewer of them")
TABLE_ROWS = Limit(1_000_000, "rows", "keep every tenth row, or split the table by runs")
"""Most rows of a table: a few compressed bytes may hold any number of rows, and a million take about 10 s."""
RUNS = Limit(1000, "runs", "choose one (--run), or a folder with fewer of them")
"""Runs read at once; runs that --run does not choose are not counted."""
FOUND = Limit(20_000, "runs in one file or folder", "split it")
VALUES = Limit(6_000_000, "values of metrics that could be of use", "log every tenth step")
"""130 bytes each while a log of one metric is sorted (3 million took 440 MB), fewer with several in a row."""
EVALUATIONS = Limit(200_000, "evaluations", "read fewer runs at once, or keep every tenth row")
"""Most evaluations of all runs together, and rows of a table of points."""
TOML = Limit(2**20, "bytes in a recipe or a study", "write less, or put what is long into files")
TEXT = Limit(2**28, "bytes of decoded text in one column", "leave that column out, or shorten its texts")

_SMALL_JSON = 2**20  # takes at most 100 MB
_PER_TABLE, _PER_LIST, _PER_VALUE = 240, 90, 100


def check_json(data: bytes, where: str | Path) -> None:
    """Raise an InputError if the objects of a JSON text would take more memory than `JSON` allows.

    The memory is bounded before parsing, from the characters that start an object, a list or another value:
    in CPython an empty dict takes 64 bytes, one with a key 184 to 232, a list 56 to 88, and a float in a dict
    about 100. Commas and brackets within strings are counted too, which makes the check stricter. A string
    with one character beyond Latin-1 takes up to four bytes for each of its characters.
    """
    if len(data) <= _SMALL_JSON:
        return
    width = 1 if data.isascii() else 4
    objects = _PER_TABLE * data.count(b"{") + _PER_LIST * data.count(b"[") + _PER_VALUE * data.count(b",")
    JSON.check(width * len(data) + objects, where)
