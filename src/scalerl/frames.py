"""Results as pandas data frames, where pandas is there; the package works without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.errors import InputError


def data_frame(columns: Mapping[str, Any]) -> Any:
    """A `pandas.DataFrame` of these columns, all of one length.

    Raises:
        InputError: pandas is not installed.
    """
    return _pandas().DataFrame(dict(columns))


def whole_numbers(values: Sequence[int | None]) -> Any:
    """A column of whole numbers of any data frame; None is NA.

    Raises:
        InputError: pandas is not installed.
    """
    return _pandas().array(list(values), dtype="Int64")


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise InputError("a data frame needs pandas: pip install pandas") from None
    return pd


def of_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """A data frame with these columns, of rows that may lack some.

    Raises:
        InputError: pandas is not installed.
    """
    return data_frame({name: [row.get(name) for row in rows] for name in names})
