"""Checks of numbers that several tables of a recipe share; each raises a ValueError that names the key."""

from __future__ import annotations

import math


def positive(**values: float) -> None:
    """Raise a ValueError unless all `values` are above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite")


def at_least(bound: int, **values: float) -> None:
    """Raise a ValueError unless all `values` are `bound` or more."""
    for name, value in values.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}")
