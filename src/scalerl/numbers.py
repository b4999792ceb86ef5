"""Numbers as text for pages and terminals: `0.803`, `14.6 TFLOP`, `79 %`, `–` for NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

DASH = "–"
MINUS = "−"
_LARGEST = 1e100

_SI = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_WORDS = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e3, "thousand "))
_ONE = {
    "gpu_hours": "GPU-hour",
    "flops": "FLOP",
    "tokens": "token",
    "tokens_processed": "processed token",
    "samples": "completion",
    "steps": "step",
    "dollars": "dollar",
}


@dataclass(frozen=True)
class Unit:
    """A unit that keeps the numbers of one run short: `shown = value / size`."""

    size: float
    name: str

    def show(self, value: Any) -> str:
        """Return the value with three significant digits and the unit's name; a dash for NaN or None."""
        number = as_float(value)
        return f"{plain(number / self.size)} {self.name}" if math.isfinite(number) else DASH


def unit_for(axis: str, largest: float, of_one_device: bool = False) -> Unit:
    """Return the unit for compute up to `largest` on `axis` (one of `record.AXES`, or a column's name).

    With `of_one_device`, its name says that it counts one device alone (`scalerl.record.devices`).
    """
    if of_one_device:
        unit = unit_for(axis, largest)
        return Unit(unit.size, f"{unit.name} of one device")
    if axis == "gpu_hours":
        if largest < 0.1:
            return Unit(1 / 3600, "GPU-seconds")
        return Unit(1 / 60, "GPU-minutes") if largest < 2 else Unit(1.0, "GPU-hours")
    scales = _SI if axis == "flops" else _WORDS if largest >= 1e4 else ()
    size, prefix = next(((size, prefix) for size, prefix in scales if largest >= size), (1.0, ""))
    if axis == "flops":
        return Unit(size, f"{prefix}FLOP")
    return Unit(size, f"{prefix}{_ONE[axis]}s" if axis in _ONE else f"{prefix}{axis}")


def amount_text(axis: str, amount: float) -> str:
    """Return an amount of compute in a unit that keeps it short: `1.50 TFLOP`, `16,000 GPU-hours`."""
    return unit_for(axis, amount).show(amount)


def one_unit(axis: str) -> str:
    """Return the name of one unit of an axis (of `record.AXES`, or a column), as in "gain per GPU-hour"."""
    return _ONE.get(axis, f"unit of {axis}")


def axis_name(axis: str) -> str:
    """Return the name of a compute axis: `GPU-hours`, `FLOPs`; a column's name unchanged."""
    return f"{_ONE[axis]}s" if axis in _ONE else axis


def as_float(value: Any) -> float:
    """Return `value` as a float; NaN for None and any other non-number, as records may lack any field.

    Finite numbers are clipped to [-1e100, 1e100], as sums and axes of larger ones overflow.
    """
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON allows integers of any size
        return math.nan
    return min(max(number, -_LARGEST), _LARGEST) if math.isfinite(number) else number


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def pair(value: Any) -> tuple[float, float]:
    """Return `value` as (lo, hi), with NaN for what is not a number; both NaN if it is not a pair."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return math.nan, math.nan
    return as_float(value[0]), as_float(value[1])


def rate(value: Any) -> str:
    """Return a pass rate, share or ceiling with three decimals: `0.803`."""
    number = as_float(value)
    # Adding 0.0 turns the -0.0 of a small negative number into 0.0.
    return f"{round(number, 3) + 0.0:.3f}".replace("-", MINUS) if math.isfinite(number) else DASH


def interval(value: Any, show: Callable[[float], str]) -> str:
    """Return an interval `[low, high]`, with ends formatted by `show`; a dash if an end is unknown."""
    lo, hi = pair(value)
    return DASH if math.isnan(lo) or math.isnan(hi) else f"[{show(lo)}, {show(hi)}]"


def rate_interval(value: Any) -> str:
    """Return an interval of rates: `[0.771, 0.832]`."""
    return interval(value, rate)


def plain(value: Any) -> str:
    """Return three significant digits, or an integer in full; an exponent below 1e-3 and from 1e9; `∞`."""
    number = as_float(value)
    if not math.isfinite(number):
        return "∞" if number == math.inf else DASH
    if number != 0 and not 1e-3 <= abs(number) < 1e9:
        return f"{number:.2e}"
    if number.is_integer():
        return f"{number:,.0f}"
    digits = 2 - math.floor(math.log10(abs(number)))
    return f"{number:,.{min(max(digits, 0), 6)}f}"


def plus_minus(value: float, sd: float, show: Callable[[float], str]) -> str:
    """Return a value and its standard deviation, two digits of it, with equal decimals: `30.49 ± 0.18`.

    `show` formats both if the deviation is not finite and positive.
    """
    if not math.isfinite(value + sd) or sd <= 0:
        return f"{show(value)} ± {show(sd)}"
    digits = 1 - math.floor(math.log10(float(f"{sd:.1e}")))
    numbers = (f"{round(number, digits):,.{max(digits, 0)}f}".replace("-", MINUS) for number in (value, sd))
    return " ± ".join(numbers)


def percent(value: Any) -> str:
    """Return a share as a percentage: `50 %`, `2.4 %`."""
    number = as_float(value) * 100
    if not math.isfinite(number):
        return DASH
    return f"{number:.0f} %" if number == 0 or number >= 9.95 else f"{number:.1f} %"


def chance_text(value: Any) -> str:
    """Return a probability: `77 %`; `over 99 %` or `under 1 %`, as posterior draws resolve no finer."""
    number = as_float(value)
    return "over 99 %" if number > 0.99 else "under 1 %" if number < 0.01 else percent(number)


def signed(value: Any) -> str:
    """Return a difference of rates with its sign: `+0.042`, `−0.031`."""
    text = rate(value)
    return text if text == DASH or text.startswith(MINUS) else f"+{text}"


def p_value(value: Any) -> str:
    """Return a p-value with three decimals: `0.012`; `<0.001` if smaller, and `1` if it rounds to 1."""
    number = as_float(value)
    return "<0.001" if number < 0.0005 else "1" if number >= 0.9995 else rate(value)


def duration(seconds: Any) -> str:
    """Return seconds as `35 s`, `4.2 min`, `7.5 h`."""
    number = as_float(seconds)
    if not math.isfinite(number):
        return DASH
    if number < 120:
        return f"{number:.0f} s"
    return f"{number / 60:.1f} min" if number < 7200 else f"{number / 3600:.1f} h"


def short_numbers(value_N: np.ndarray, digits: int = 6) -> list[float | None]:
    """Round numbers for JSON to `digits` figures, which halves the size of a page; None if not finite."""
    return [short_number(value, digits) for value in value_N.tolist()]


def short_number(value: float, digits: int = 6) -> float | None:
    """Round one number as `short_numbers` does."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
