"""Parquet tables of metrics, one row a step, as exported by trackers and from data frames."""

from collections.abc import Iterator, Sequence, Set
from importlib import import_module
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.curve.points import LABELS
from scalerl.errors import InputError, first_line, listed
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import first_bytes, name_of
from scalerl.ingest.formats.rows import RUNS, STEPS, TIMES, RowReader
from scalerl.ingest.logs.log import Log

_MAGIC = b"PAR1"
_NUMBERS = ("INT32", "INT64", "FLOAT", "DOUBLE")
"""Types of columns in which all values have the same size."""
_KEYS = frozenset((*STEPS, *TIMES, *RUNS, *LABELS))
_TEXTS = ("string", "large_string", "binary", "large_binary")
_ROWS = 4096
"""Rows that are held as Python objects at a time."""


def recognises(path: Path) -> bool:
    """Return whether this is a Parquet file; its columns are not examined."""
    return first_bytes(path, len(_MAGIC)) == _MAGIC


def read(path: Path, wanted: Wanted) -> list[Log]:
    """Read one run, or several by a column of names; only the wanted columns are read."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install 'scalerl[data]'") from error
    reader = RowReader(str(path), "parquet", name_of(path), wanted)
    try:
        with parquet.ParquetFile(path) as file:
            limits.TABLE_COLUMNS.check(file.metadata.num_columns, path)
            limits.TABLE_ROWS.check(file.metadata.num_rows, path)
            texts = [one.name for one in file.schema_arrow if _is_text(one.type, arrow.types)]
        # These stay in the dictionary encoding of the file.
        with parquet.ParquetFile(path, read_dictionary=[name for name in texts if name in _KEYS]) as file:
            _read_table(file, reader, path, wanted, arrow)
    except InputError:
        raise
    except (OSError, ValueError, arrow.ArrowException, MemoryError, OverflowError) as error:
        raise InputError(f"{path}: not Parquet, or damaged ({first_line(error)})") from error
    return reader.build()


FORMAT = Format("parquet", "a Parquet table of metrics with a step", recognises, read)


def _read_table(file: Any, reader: RowReader, path: Path, wanted: Wanted, arrow: Any) -> None:
    """Read the rows of a file, a part of a row group at a time."""
    types = arrow.types
    fields = list(file.schema_arrow)
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: two columns have one name; rename all but one")
    if not any(name in STEPS for name in names):
        raise InputError(f"{path}: no column of steps, {', '.join(STEPS)}; columns: {listed(names)}")
    numbers = {
        field.name for field in fields if types.is_integer(field.type) or types.is_floating(field.type)
    }
    texts = {field.name for field in fields if field.name in _KEYS and _is_text(field.type, types)}
    plain = texts | {field.name for field in fields if field.name in _KEYS and types.is_primitive(field.type)}
    # In a table with one metric per row, "value" belongs to each metric in turn.
    own = {"value"} if "metric" in texts else set[str]()
    kept = [name for name in names if name in plain or (name in numbers and (name in own or wanted(name)))]
    kept += _numbers_within([field.name for field in fields if types.is_struct(field.type)], file)
    _check_texts(file.metadata, texts, path)
    # An unwanted column is not read, but its name may be asked for: a number in one row records it.
    others = dict.fromkeys(numbers.difference(kept), 0.0)
    line = 0
    for batch in file.iter_batches(_ROWS, columns=kept):
        for line, row in enumerate(_rows(_plain(batch, arrow), path), start=line + 1):  # noqa: B020
            reader.add({**others, **row}, line)
            others = {} if reader.has_steps else others


def _is_text(kind: Any, types: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(getattr(types, f"is_{name}")(kind) for name in _TEXTS)


def _check_texts(metadata: Any, texts: Set[str], path: Path) -> None:
    """Raise an InputError if the texts of a row group are too large once decompressed."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.split(".")[0] in texts:
                limits.TEXT.check(column.total_uncompressed_size, f"{path}, column '{column.path_in_schema}'")


def _rows(batch: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part of a table.

    A text that repeats stays one object: otherwise 4,096 rows that name one run in 1 MB, which a dictionary
    holds once in the file, would take 4 GB.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if hasattr(column, "dictionary"):
            limits.TEXT.check(column.dictionary.nbytes, f"{path}, column '{name}'")
            texts = [*column.dictionary.to_pylist(), None]
            columns[name] = [texts[-1 if at is None else at] for at in column.indices.to_pylist()]
        else:
            columns[name] = column.to_pylist()
    for cells in zip(*columns.values(), strict=True):
        yield dict(zip(columns, cells, strict=True))


def _numbers_within(structs: Sequence[str], file: Any) -> list[str]:
    """Return the paths of the numbers in structs: a text in one would be read whole, whatever its size."""
    columns = [file.schema.column(i) for i in range(len(file.schema.names))]
    return [
        column.path
        for column in columns
        if column.path.split(".")[0] in structs
        and (column.physical_type in _NUMBERS or column.logical_type.type == "FLOAT16")
        and not column.max_repetition_level
    ]


def _plain(batch: Any, arrow: Any) -> Any:
    """Cast the times of a part of a table to microseconds, the resolution of Python's times."""
    for index, field in enumerate(batch.schema):
        if arrow.types.is_timestamp(field.type):
            kind = arrow.timestamp("us", field.type.tz)
            batch = batch.set_column(index, field.name, batch.column(index).cast(kind, safe=False))
    return batch
