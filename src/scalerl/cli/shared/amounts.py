"""Amounts of compute as they are typed: `12k`, `1.5M`, `12_000`, `2x` (twice the data), `600 steps`."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerl.errors import InputError

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_AMOUNT = re.compile(
    r"(?P<number>[0-9](?:_?[0-9])*(?:\.[0-9]*)?|\.[0-9]+)(?P<power>[eE][+-]?[0-9]+)?"
    r" ?(?P<scale>[kKMBT](?![A-Za-z_]))? ?(?P<unit>[^0-9\s,._+-][^,]*)?"
)
_GROUP = r"[0-9]{3}(?![0-9_eE])"
_GROUPED = re.compile(rf"(?<![0-9_.])[1-9][0-9]{{0,2}}(?:,{_GROUP})+")
"""What may be one number whose digits are grouped by commas."""


@dataclass(frozen=True)
class Amount:
    """One amount of compute, as it was typed, before the axis of the data is known."""

    value: float
    unit: str
    """What stands behind the number: the name of an axis, `x` for times the data, or nothing."""
    text: str

    @property
    def is_multiple(self) -> bool:
        """Whether it is a multiple of the compute of the data."""
        return self.unit in ("x", "X", "×")

    @property
    def axis(self) -> str | None:
        """The compute axis of runs that it is named with; None without one."""
        from scalerl.record.reader import AXES, unit_of

        return {_key(name): axis for axis in AXES for name in (axis, unit_of(axis))}.get(_key(self.unit))

    def on(self, option: str, axis: str, reach: float | None, axes: Sequence[str]) -> float:
        """Return it in the unit of `axis`.

        Args:
            option: that it was given with, for messages.
            axis: of compute.
            reach: the largest compute of the data on it; None where it has no multiples.
            axes: which the data have.

        Raises:
            InputError: it is named with another axis, or a multiple where `reach` is not known.
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
        if axis in (self.axis, self.unit) or _key(self.unit) == _key(axis):
            return self.value
        if axis == "dollars" and self.axis == "gpu_hours":
            raise InputError(f"{given}: --price measures compute in dollars; leave it out, or name dollars")
        if (other := self.axis or self.unit) in axes:
            raise InputError(
                f"{given}: compute is on the axis {axis} here, to which {other} have no fixed rate; for an "
                f"answer in {other} add --x {other}"
            )
        known = f"axes here: {', '.join(dict.fromkeys((axis, *axes)))}"
        if self.axis is not None:
            raise InputError(
                f"{given}: compute is on the axis {axis} here, and {other} are not logged; {known}"
            )
        raise InputError(
            f"{given}: {self.unit!r} is neither an axis nor k, M, B or T (1e3, 1e6, 1e9, 1e12) nor x (times "
            f"the data); {known}"
        )


def _key(name: str) -> str:
    """Return a name of an axis without what people write in several ways: `GPU-hours`, `gpu_hour`."""
    return name.strip().lower().replace("-", "_").replace(" ", "_").removesuffix("s")


def amount(is_positive: bool = False) -> Callable[[str], Amount]:
    """Return the type of an argument that is one amount of compute: 0 or more, or above 0."""
    expected = "a number above 0" if is_positive else "compute of 0 or more"

    def convert(text: str) -> Amount:
        if _GROUPED.search(text):
            raise argparse.ArgumentTypeError(
                f"expected one amount of compute, found {text!r}: write {_spelled(text)}"
            )
        found = _AMOUNT.fullmatch(text.strip().removeprefix("-").removeprefix("+"))
        value = math.nan
        if found is not None:
            value = float(found["number"] + (found["power"] or "")) * _SCALES.get(found["scale"] or "", 1.0)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
        if text.strip().startswith("-") or (is_positive and value == 0):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        assert found is not None
        return Amount(value, (found["unit"] or "").strip(), text.strip())

    return convert


def amounts(text: str) -> tuple[Amount, ...]:
    """Convert amounts of compute, separated by commas.

    A comma may also be meant to group digits: `12,000`. Such a text is refused where a group of three digits
    begins with 0, where the amounts do not ascend, and where all of it would be one grouped number of a first
    part of one or two digits (`12,500`). `100,200`, `10,20,400` and `12, 500` are lists.
    """
    parts = text.split(",")
    found = tuple(map(amount(), parts))
    if numbers := _GROUPED.findall(text):
        if any(",0" in number for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} has a comma in a number: write {_spelled(text)}")
        is_one = all(re.match(_GROUP, part) for part in parts[1:]) and len(parts[0]) < 3
        if is_one or not all(a.value < b.value for a, b in itertools.pairwise(found)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is one amount with a comma in it, or several: write {_spelled(text)}, or "
                + " ".join(f"--at {shlex.quote(part.strip())}" for part in parts)
            )
    return found


def _spelled(text: str) -> str:
    """Return how to type amounts without the commas that group their digits: `12000 or 12k`."""
    grouped = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    short = re.sub(r"(?<=[0-9])000(?![0-9A-Za-z_.])", "k", grouped)
    return " or ".join(dict.fromkeys(map(shlex.quote, (grouped, short))))
