"""Custom families of curves: loaded by name, and checked before they are averaged."""

import math
from collections.abc import Sequence

import numpy as np

from scalerl.curve.families import FAMILIES, Family
from scalerl.errors import InputError, in_one_line
from scalerl.kinds import Choice
from scalerl.own_code import OWN


def load_family(kind: str) -> Family:
    """Return the family that `kind` names: `module:Class`, `file.py:Class`, or an entry point.

    Raises:
        InputError: it cannot be loaded, lacks a method of `Family`, or has a field without a default.
    """
    family = Choice("families", Family, None).make(kind)
    if family is None:
        raise InputError(f"{kind} names no family of curves: give {OWN}")
    return family


def with_extra(extra: Sequence[Family]) -> tuple[Family, ...]:
    """Return `FAMILIES` followed by the `extra` families, each checked by `check_family`.

    Raises:
        InputError: two families share a name, or one fails the check.
    """
    families = (*FAMILIES, *extra)
    names = [family.name for family in families]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two families of curves are named {twice[0]!r}: give each a name of its own")
    for family in extra:
        check_family(family)
    return families


def check_family(family: Family) -> None:
    """Check that the methods of a family describe one curve that rises from 0 to 1 and is 1/2 at x = 0.

    Raises:
        InputError: they do not; the message names the method, B and x where they disagree.
    """
    # An odd number of nodes has x = 0 exactly, where every share must be 1/2.
    b, x = (a.ravel() for a in np.meshgrid([0.3, 1.0, 3.0], np.linspace(-4.0, 4.0, 33)))
    b, x = b[np.abs(b * x) <= 8.0], x[np.abs(b * x) <= 8.0]
    # Truncation and rounding of these central differences are both near 1e-11, far below the 1e-5 allowed.
    step = 1e-5
    with in_one_line(f"family {family.name!r}: its methods cannot be called with arrays"):
        share = family.share(b, x)
        by_log_b = (family.share(b * np.exp(step), x) - family.share(b * np.exp(-step), x)) / (2 * step)
        by_log_c = (family.share(b, x + step) - family.share(b, x - step)) / (2 * step)
        same, slope_b, slope_c = family.slopes(b, x)
        inner = (share > 1e-6) & (share < 1 - 1e-6)
        back = family.inverse(b[inner], share[inner])
        # Where the curve has a kink, as a power law has at R_0, a difference across it is no derivative.
        smooth = np.abs(family.share(b, x + 2 * step) - 2 * share + family.share(b, x - 2 * step)) < 1e-8
        # Fits also ask for compute 0, for computes far from C_mid, and for arrays of several axes.
        far_b, far_x = (a.ravel() for a in np.meshgrid([0.1, 1.0, 10.0], [-math.inf, -800.0, 800.0]))
        with np.errstate(all="ignore"):
            far = family.share(far_b, far_x)
        column = family.share(b[:, None], x[:, None])
        rules = (
            ("share is not within 0 and 1", (share >= 0) & (share <= 1), b, x),
            ("share is not within 0 and 1", (far >= 0) & (far <= 1), far_b, far_x),
            ("share of a column is another", np.abs(column - share[:, None]) < 1e-9, b, x),
            ("share falls", by_log_c >= 0, b, x),
            ("share is not 1/2", (x != 0) | (np.abs(share - 0.5) < 1e-9), b, x),
            ("slopes returns another share", np.abs(same - share) < 1e-9, b, x),
            ("slopes has a wrong d share / d log B", ~smooth | (np.abs(slope_b - by_log_b) < 1e-5), b, x),
            ("slopes has a wrong d share / d log C", ~smooth | (np.abs(slope_c - by_log_c) < 1e-5), b, x),
            ("inverse is not that of share", np.abs(back - x[inner]) < 1e-5, b[inner], x[inner]),
        )
    for what, holds, at_b, at_x in rules:
        if not np.all(holds):
            index = int(np.argmin(holds))
            raise InputError(
                f"family {family.name!r}: {what} at B = {at_b[index]:g}, log(C / C_mid) = {at_x[index]:g}"
            )
