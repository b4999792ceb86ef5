"""Types of arguments that are amounts of compute (`scalerl.record.amounts`), one or several."""

import argparse
import itertools
import re
import shlex
from collections.abc import Callable

from scalerl.errors import InputError
from scalerl.record.amounts import GROUP, GROUPED, Amount, parse_amount, spelled


def amount(is_positive: bool = False) -> Callable[[str], Amount]:
    """Return the type of an argument that is one amount of compute: 0 or more, or above 0."""

    def convert(text: str) -> Amount:
        try:
            return parse_amount(text, is_positive)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def amounts(text: str) -> tuple[Amount, ...]:
    """Convert amounts of compute, separated by commas.

    A comma may also be meant to group digits: `12,000`. Such a text is refused where a group of three digits
    begins with 0, where the amounts do not ascend, and where all of it would be one grouped number of a first
    part of one or two digits (`12,500`). `100,200`, `10,20,400` and `12, 500` are lists.
    """
    parts = text.split(",")
    found = tuple(map(amount(), parts))
    if numbers := GROUPED.findall(text):
        if any(",0" in number for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} has a comma in a number: write {spelled(text)}")
        is_one = all(re.match(GROUP, part) for part in parts[1:]) and len(parts[0]) < 3
        if is_one or not all(a.value < b.value for a, b in itertools.pairwise(found)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is one amount with a comma in it, or several: write {spelled(text)}, or "
                + " ".join(f"--at {shlex.quote(part.strip())}" for part in parts)
            )
    return found
