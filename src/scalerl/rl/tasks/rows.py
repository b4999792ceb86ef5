"""Rows of a data set, from wherever it is: a file, a folder, or the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, first_line
from scalerl.jsonl import read_jsonl

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class DatasetRow:
    """One row: its number as a reader counts, and its values by column."""

    source: str
    unit: str
    number: int
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where it stands, for an error."""
        return f"{self.source}, {self.unit} {self.number}"

    def get(self, column: str) -> Any:
        """The value of a column; `a.b.0` goes into the objects and the lists of column `a`.

        Raises:
            InputError: there is no such column.
        """
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        try:
            for part in column.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError) as error:
            there = ", ".join(map(str, self.values))
            raise InputError(f"{self.place}: no column {column!r}; there are: {there}") from error
        return value


def read_rows(path: str, subset: str | None, split: str, columns: Iterable[str]) -> list[DatasetRow]:
    """The rows of a JSONL or Parquet file, of a folder, or of a data set of the Hugging Face Hub.

    `subset` and `split` are those of the last two; of Parquet and of data sets only `columns` are read.

    Raises:
        InputError: there is no such file, it is not what its name says, or a library is missing.
    """
    file = Path(path)
    if file.suffix in (".jsonl", ".ndjson"):
        return _jsonl(file)
    if file.suffix == ".parquet":
        return _parquet(file, columns)
    if file.is_file():
        raise InputError(f"{path}: expected a .jsonl or .parquet file, a folder, or a name on the Hub")
    if not file.is_dir() and not _HUB_NAME.fullmatch(path):
        raise InputError(f"{path}: no such file or folder")
    return _data_set(path, subset, split, columns)


def _jsonl(file: Path) -> list[DatasetRow]:
    unfinished: list[str] = []
    rows = [DatasetRow(str(file), "line", number, values) for number, values in read_jsonl(file, unfinished)]
    if unfinished:
        raise InputError(f"{file}: the last line is unfinished: not JSON")
    return rows


def _parquet(file: Path, columns: Iterable[str]) -> list[DatasetRow]:
    parquet = _library("pyarrow.parquet")
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        table = parquet.ParquetFile(file)
        values = table.read(columns=_wanted(str(file), table.schema_arrow.names, columns)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise InputError(f"{file}: not Parquet ({first_line(error)})") from error
    return [DatasetRow(str(file), "row", number, row) for number, row in enumerate(values, start=1)]


def _data_set(path: str, subset: str | None, split: str, columns: Iterable[str]) -> list[DatasetRow]:
    datasets = _library("datasets")
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            found = datasets.load_from_disk(path)
            if isinstance(found, dict) and split not in found:
                raise InputError(f"{path}: no split {split!r}; there are: {', '.join(found)}")
            found = found[split] if isinstance(found, dict) else found
        else:
            found = datasets.load_dataset(path, subset, split=split)
    except InputError:
        raise
    except Exception as error:  # the library has a dozen kinds; each is one line for the user
        where = "" if Path(path).is_dir() else " from the Hub, and there is no such file or folder"
        raise InputError(f"{path}: cannot be loaded{where} ({first_line(error)})") from error
    source = f"{path}[{split}]"
    found = found.select_columns(_wanted(source, found.column_names, columns))
    return [DatasetRow(source, "row", number, row) for number, row in enumerate(found, start=1)]


def _wanted(source: str, there: list[str], columns: Iterable[str]) -> list[str]:
    """Of the columns there are, those that are asked for: by name, or as the first part of a longer one."""
    wanted = set()
    for column in columns:
        found = {column, column.partition(".")[0]} & set(there)
        if not found:
            raise InputError(f"{source}: no column {column!r}; there are: {', '.join(there)}")
        wanted |= found
    return sorted(wanted)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(f"this data needs {package}: pip install 'scalerl[data]'") from error
