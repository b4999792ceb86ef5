"""Parquet tables of metrics, a row a step, as dumps of trackers and of data frames are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, first_line
from scalerl.ingest.formats import Format, Wanted
from scalerl.ingest.lines import name_of
from scalerl.ingest.log import Log, listed
from scalerl.ingest.rows import RUNS, STEPS, TIMES, RowReader

_MAGIC = b"PAR1"
_NUMBERS = ("INT32", "INT64", "FLOAT", "DOUBLE")
"""Types of columns in which every value is as large as the other."""
_ROWS = 4096
"""Rows that are in memory as Python objects at a time."""


def recognises(path: Path) -> bool:
    """Whether this is a Parquet file; its columns are not looked at."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read(path: Path, wanted: Wanted) -> list[Log]:
    """A run, or several by a column that names them; only the columns that are wanted are read."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install 'scalerl[data]'") from error
    reader = RowReader(str(path), "parquet", name_of(path), wanted)
    try:
        with parquet.ParquetFile(path) as file:
            _read_table(file, reader, path, wanted, arrow)
    except InputError:
        raise
    except (OSError, ValueError, arrow.ArrowException, MemoryError, OverflowError) as error:
        raise InputError(f"{path}: not Parquet, or damaged ({first_line(error)})") from error
    if not reader.has_steps:
        raise InputError(f"{path}: no row has a step, a number in a column {', '.join(STEPS)}")
    return list(reader.build())


FORMAT = Format("parquet", "a Parquet table of metrics with a step", recognises, read)


def _read_table(file: Any, reader: RowReader, path: Path, wanted: Wanted, arrow: Any) -> None:
    """The rows of a file, a part of a row group at a time."""
    types = arrow.types
    fields = list(file.schema_arrow)
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: two columns have one name; rename all but one")
    if not any(name in STEPS for name in names):
        raise InputError(f"{path}: no column of steps, {', '.join(STEPS)}; columns: {listed(names)}")
    keys = (*STEPS, *TIMES, *RUNS)
    numbers = [
        field.name for field in fields if types.is_integer(field.type) or types.is_floating(field.type)
    ]
    kept = [name for name in names if name in keys or (name in numbers and wanted(name))]
    kept += _numbers_within([field.name for field in fields if types.is_struct(field.type)], file)
    # A column that is not wanted is not read, but its name may be asked for: a number in one row gives it.
    others = {name: 0.0 for name in numbers if name not in kept}
    line = 0
    for batch in file.iter_batches(_ROWS, columns=kept):
        for line, row in enumerate(_plain(batch, arrow).to_pylist(), start=line + 1):  # noqa: B020
            reader.add({**others, **row}, line)
            others = {} if reader.has_steps else others


def _numbers_within(structs: Sequence[str], file: Any) -> list[str]:
    """The columns of numbers in structs, by their paths: text in one would be read whole, of any size."""
    columns = [file.schema.column(i) for i in range(len(file.schema.names))]
    return [
        column.path
        for column in columns
        if column.path.split(".")[0] in structs
        and (column.physical_type in _NUMBERS or column.logical_type.type == "FLOAT16")
        and not column.max_repetition_level
    ]


def _plain(batch: Any, arrow: Any) -> Any:
    """A part of a table whose times are of microseconds, as those of Python are."""
    for index, field in enumerate(batch.schema):
        if arrow.types.is_timestamp(field.type):
            kind = arrow.timestamp("us", field.type.tz)
            batch = batch.set_column(index, field.name, batch.column(index).cast(kind, safe=False))
    return batch
