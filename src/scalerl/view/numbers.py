"""Numbers and names as a reader meets them: `0.803`, `14.6 TFLOP`, `Fréchet`, and a dash for NaN."""

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
        """The value with three significant digits and the unit's name; a dash for NaN or None."""
        number = as_float(value)
        return f"{plain(number / self.size)} {self.name}" if math.isfinite(number) else DASH


def unit_for(axis: str, largest: float, of_one_device: bool = False) -> Unit:
    """The unit for compute up to `largest` on `axis` (one of `record.AXES`, or the name of a column).

    Its name says so where the hours are those of one device alone (`scalerl.record.devices`).
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


def one_unit(axis: str) -> str:
    """One unit of an axis (one of `record.AXES`, or the name of a column), as in "gain per GPU-hour"."""
    return _ONE.get(axis, f"unit of {axis}")


def axis_name(axis: str) -> str:
    """A compute axis as it is chosen: `GPU-hours`, `FLOPs`; the name of a column as it stands."""
    return f"{_ONE[axis]}s" if axis in _ONE else axis


def family_name(name: str) -> str:
    """A family of curves as people write it: `Fréchet` for `frechet`; another name stays as it is."""
    from scalerl.curve.families import LABELS  # it takes numpy, which `--help` does without

    return LABELS.get(name, name)


def family_weights(weights: Any) -> str:
    """The families by falling weight, from .005: `log-logistic 0.55, Fréchet 0.31`; a dash without any."""
    known = {name: as_float(weight) for name, weight in as_mapping(weights).items() if weight is not None}
    ranked = sorted(known.items(), key=lambda item: -item[1])
    shown = [f"{family_name(name)} {weight:.2f}" for name, weight in ranked if weight >= 0.005]
    return ", ".join(shown) or DASH


def as_float(value: Any) -> float:
    """`value` as a float; NaN for None and for what is no number (records may lack any field).

    A finite one is brought to 1e100 or -1e100 if it is beyond: sums and axes of larger ones overflow.
    """
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON knows whole numbers of any size
        return math.nan
    return min(max(number, -_LARGEST), _LARGEST) if math.isfinite(number) else number


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` where it is a mapping, and an empty one otherwise."""
    return value if isinstance(value, Mapping) else {}


def pair(value: Any) -> tuple[float, float]:
    """`value` as (lo, hi); NaN where it is no pair of numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return math.nan, math.nan
    return as_float(value[0]), as_float(value[1])


def rate(value: Any) -> str:
    """A pass rate, share or ceiling with three decimals: `0.803`."""
    number = as_float(value)
    # Not −0.000 of a small negative one.
    return f"{round(number, 3) + 0.0:.3f}".replace("-", MINUS) if math.isfinite(number) else DASH


def interval(value: Any, show: Callable[[float], str]) -> str:
    """An interval `[low, high]`, its ends as `show` writes them; a dash where one is not known."""
    lo, hi = pair(value)
    return DASH if math.isnan(lo) or math.isnan(hi) else f"[{show(lo)}, {show(hi)}]"


def rate_interval(value: Any) -> str:
    """An interval of rates: `[0.771, 0.832]`."""
    return interval(value, rate)


def plain(value: Any) -> str:
    """Three significant digits, whole numbers whole; powers of ten below 1e-3 and from 1e9; `∞`."""
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
    """A value and its standard deviation of two digits, with as many decimals: `30.49 ± 0.18`.

    `show` writes the value where there is no such deviation.
    """
    if not math.isfinite(value + sd) or sd <= 0:
        return f"{show(value)} ± {show(sd)}"
    digits = 1 - math.floor(math.log10(float(f"{sd:.1e}")))
    numbers = (f"{round(number, digits):,.{max(digits, 0)}f}".replace("-", MINUS) for number in (value, sd))
    return " ± ".join(numbers)


def percent(value: Any) -> str:
    """A share as a percentage: `50 %`, `2.4 %`."""
    number = as_float(value) * 100
    if not math.isfinite(number):
        return DASH
    return f"{number:.0f} %" if number == 0 or number >= 9.95 else f"{number:.1f} %"


def chance_text(value: Any) -> str:
    """A probability: `77 %`; `over 99 %` or `under 1 %` at its ends, as draws of a posterior tell no more."""
    number = as_float(value)
    return "over 99 %" if number > 0.99 else "under 1 %" if number < 0.01 else percent(number)


def signed(value: Any) -> str:
    """A difference of rates with its sign: `+0.042`, `−0.031`."""
    text = rate(value)
    return text if text == DASH or text.startswith(MINUS) else f"+{text}"


def p_value(value: Any) -> str:
    """A p-value with three decimals: `0.012`; `<0.001` below that, and `1` at the other end."""
    number = as_float(value)
    return "<0.001" if number < 0.0005 else "1" if number >= 0.9995 else rate(value)


def duration(seconds: Any) -> str:
    """Seconds as `35 s`, `4.2 min`, `7.5 h`."""
    number = as_float(seconds)
    if not math.isfinite(number):
        return DASH
    if number < 120:
        return f"{number:.0f} s"
    return f"{number / 60:.1f} min" if number < 7200 else f"{number / 3600:.1f} h"


def short_numbers(value_N: np.ndarray, digits: int = 6) -> list[float | None]:
    """Numbers for JSON, rounded to `digits` figures, which halves the size of a page; None if not finite."""
    return [short_number(value, digits) for value in value_N.tolist()]


def short_number(value: float, digits: int = 6) -> float | None:
    """One of `short_numbers`."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
