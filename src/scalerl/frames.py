"""Results as pandas data frames; without pandas, which is optional, these raise an InputError."""

from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.errors import InputError


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Return a `pandas.DataFrame` of columns of equal length."""
    return _pandas().DataFrame(dict(columns))


def whole_numbers(values: Sequence[int | None]) -> Any:
    """Return a column of whole numbers, with NA for None."""
    return _pandas().array(list(values), dtype="Int64")


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise InputError("a data frame needs pandas: pip install pandas") from None
    return pd


def columns_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return these columns of rows that may lack some, by name."""
    return {name: [row.get(name) for row in rows] for name in names}
