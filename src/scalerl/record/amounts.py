"""Amounts of compute as people write them: `12k`, `300 GFLOP`, `12h`, `600 steps`, `2x` (twice the data)."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalerl.errors import InputError

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_PREFIXES = (
    *_SCALES.items(),
    *(("P", 1e15), ("E", 1e18), ("Z", 1e21), ("Y", 1e24)),
    *(("thousand ", 1e3), ("million ", 1e6), ("billion ", 1e9), ("trillion ", 1e12)),
)
"""Prefixes of a unit, as in the amounts that are printed."""
_HOURS = {"h": 1.0, "hour": 1.0, "min": 1 / 60, "minute": 1 / 60, "s": 1 / 3600, "second": 1 / 3600}
_AMOUNT = re.compile(
    r"(?P<number>[0-9](?:_?[0-9])*(?:\.[0-9]*)?|\.[0-9]+)(?P<power>[eE][+-]?[0-9]+)?"
    r" ?(?P<scale>[kKMGBT](?![A-Za-z_]))? ?(?P<unit>[^0-9\s,._+-][^,]*)?"
)
GROUP = r"[0-9]{3}(?![0-9_eE])"
GROUPED = re.compile(rf"(?<![0-9_.])[1-9][0-9]{{0,2}}(?:,{GROUP})+")
"""Matches what may be one number with digits grouped by commas."""


@dataclass(frozen=True)
class Amount:
    """One amount of compute as it was typed, before the axis of the data is known."""

    value: float
    unit: str
    """What follows the number: the name of an axis, `x` for times the data, or nothing."""
    text: str

    @property
    def is_multiple(self) -> bool:
        """Whether it is a multiple of the compute of the data."""
        return self.unit in ("x", "X", "×")

    @property
    def axis(self) -> str | None:
        """The compute axis of runs that its unit names; None without one."""
        return self._meaning[0]

    @property
    def _meaning(self) -> tuple[str | None, float]:
        """The axis of the unit, and the size of the unit on that axis."""
        known = dict(_units())
        for prefix, size in (("", 1.0), *_PREFIXES):
            name = _key(self.unit.removeprefix(prefix))
            if self.unit.startswith(prefix) and name in known:
                axis, of_one = known[name]
                return axis, size * of_one
        return None, 1.0

    def on(self, option: str, axis: str, reach: float | None, axes: Sequence[str]) -> float:
        """Return the amount in the unit of `axis`.

        Args:
            option: the option that it was given with, for messages.
            axis: the compute axis.
            reach: the largest compute of the data on the axis; None if multiples are not accepted.
            axes: the axes that could be chosen instead, as the data have them.

        Raises:
            InputError: its unit names another axis, or it is a multiple and `reach` is None.
        """
        if not self.unit or (self.unit == axis and not self.is_multiple):
            return self.value
        given = f"{option} '{self.text}'"
        if self.is_multiple:
            if axis == self.unit:
                raise InputError(
                    f"{given}: times the data, or in the unit of the axis '{axis}'? Write {self.value:g} for "
                    "the latter"
                )
            if reach is None:
                raise InputError(f"{given}: this command takes no multiple of the data; name an amount")
            return self.value * reach
        if _key(self.unit) == _key(axis):
            return self.value
        if axis == self.axis:
            return self.value * self._meaning[1]
        if axis == "dollars" and self.axis == "gpu_hours":
            raise InputError(f"{given}: --price measures compute in dollars; leave it out, or name dollars")
        if (other := self.axis or self.unit) in axes:
            raise InputError(
                f"{given}: compute is on the axis {axis} here, to which {other} have no fixed rate; for an "
                f"answer in {other} add --x {other}"
            )
        known = f"axes here: {', '.join(dict.fromkeys((axis, *axes)))}"
        if self.axis is not None:
            not_here = f"and {other} are not logged; {known}" if axes else f"and not on {other}"
            raise InputError(f"{given}: compute is on the axis {axis} here, {not_here}")
        raise InputError(
            f"{given}: {self.unit!r} is neither a unit of an axis nor k, M, G, B or T (1e3, 1e6, 1e9, 1e9, "
            f"1e12) nor x (times the data); {known}"
        )


def _units() -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield the names of units, each with its axis and its size in the unit of that axis."""
    from scalerl.record.evaluation import AXES, unit_of

    for axis in AXES:
        yield from ((_key(name), (axis, 1.0)) for name in (axis, unit_of(axis)))
    for name, size in _HOURS.items():
        yield from ((f"{device}{_key(name)}", ("gpu_hours", size)) for device in ("", "gpu_"))


def _key(name: str) -> str:
    """Return one form of a name that people write in several ways: `GPU-hours`, `gpu_hour`."""
    name = name.strip().lower().replace("-", "_").replace(" ", "_")
    return name if len(name) < 2 else name.removesuffix("s")


def parse_amount(text: str, is_positive: bool = False, what: str = "") -> Amount:
    """Return one amount of compute, 0 or more, or above 0 if `is_positive`; `what` begins a message.

    Raises:
        InputError: the text is not a number, is negative, or has commas in it.
    """
    if GROUPED.search(text):
        raise InputError(f"{what}expected one amount of compute, found {text!r}: write {spelled(text)}")
    found = _AMOUNT.fullmatch(text.strip().removeprefix("-").removeprefix("+"))
    value = math.nan
    if found is not None:
        value = float(found["number"] + (found["power"] or "")) * _SCALES.get(found["scale"] or "", 1.0)
    if found is None or not math.isfinite(value):
        raise InputError(f"{what}expected a number, found {text!r}")
    if text.strip().startswith("-") or (is_positive and value == 0):
        expected = "a number above 0" if is_positive else "compute of 0 or more"
        raise InputError(f"{what}expected {expected}, found {text!r}")
    return Amount(value, (found["unit"] or "").strip(), text.strip())


def spelled(text: str) -> str:
    """Return how to type amounts without the commas that group their digits: `12000 or 12k`."""
    grouped = GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    short = re.sub(r"(?<=[0-9])000(?![0-9A-Za-z_.])", "k", grouped)
    return " or ".join(dict.fromkeys(map(shlex.quote, (grouped, short))))
