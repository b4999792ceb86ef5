"""Results as pandas data frames, and numbers from data frames and arrays of any library.

pandas is optional: without it, converting a result to a data frame raises an InputError.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl.errors import InputError

FRAME = "data frame"
"""The name of a data frame in error messages."""
_TIMES = "mM"  # NumPy's kinds of durations and dates, which become nanoseconds as floats


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Return a `pandas.DataFrame` of columns of equal length."""
    return _pandas().DataFrame(dict(columns))


def whole_numbers(values: Sequence[int | None]) -> Any:
    """Return a column of integers, with NA for None."""
    return _pandas().array(list(values), dtype="Int64")


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise InputError("a data frame needs pandas: pip install pandas") from None
    return pd


def columns_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the named columns of rows; None where a row lacks one."""
    return {name: [row.get(name) for row in rows] for name in names}


def numbers_in(frame: Any, name: str) -> np.ndarray:
    """Return the numbers of a data frame's column, (N,), with NaN for empty cells."""
    names = [str(column) for column in frame.columns]
    if names.count(name) != 1:
        what = f"{names.count(name)} columns are" if name in names else "no column is"
        raise InputError(
            f"{FRAME}: {what} named '{name}'; pass x=... for the compute, y=... for the pass rate; columns: "
            + ", ".join(names)
        )
    column = frame.iloc[:, names.index(name)]
    values = column if column.dtype.kind in _TIMES else column.to_numpy(na_value=np.nan)
    return numbers_of(values, f"{FRAME}, column '{name}'")


def numbers_of(values: Any, what: str) -> np.ndarray:
    """Return numbers as an array of floats, with NaN for masked cells; `what` names them in errors."""
    try:
        if np.asarray(values).dtype.kind in _TIMES:
            raise InputError(f"{what}: holds dates or durations: give numbers, such as hours since the start")
        return np.ma.array(values, dtype=float, copy=True).filled(np.nan)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a torch tensor that requires grad
        raise InputError(f"{what}: not all numbers ({error})") from error
