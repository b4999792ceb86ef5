"""Labels that stand at what they name: colours and markers of arms, and places that keep labels apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scalerl.view.style import CEILING, FORECAST, INK, LATER, PURPLE, SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = ((INK, "o"), (FORECAST, "s"), (LATER, "^"), (CEILING, "D"), (PURPLE, "v"), (SKY, "P"))
"""Colour and marker, the base's first: told apart with every common colour deficiency, and in grey."""
RUN_LOOKS = ((FORECAST, "o"), (LATER, "s"), (CEILING, "^"), (PURPLE, "D"), (INK, "v"), (SKY, "P"))
"""The same for runs, none of which is a base: as the chart of a page has them (scalerl/view/web/marks.js)."""
DASHES = ("-", "--", ":", "-.")
LONGEST = 26
"""Letters of a name in a figure."""


def run_look(place: int) -> tuple[str, str, str]:
    """Colour, marker and dashes of the run at a place, as in the chart of a page."""
    turn, colour = divmod(place, len(RUN_LOOKS))
    marker = RUN_LOOKS[(place + turn) % len(RUN_LOOKS)][1]
    return RUN_LOOKS[colour][0], marker, DASHES[turn % len(DASHES)]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names that fit beside a figure, no two alike; the tables have them whole.

    Long ones lose the tables of their fields (`optimiser.lr=1e-4` becomes `lr=1e-4`), then their middle.
    """
    found: dict[str, str] = {}
    for name in names:
        text = "".join(letter if letter.isprintable() else " " for letter in name)
        if len(text) > LONGEST:
            text = re.sub(r"[^\s=]+\.(?=[^\s.=]+=)", "", text)
        text = _elided(text, LONGEST)
        if text in found.values():
            text = f"{_elided(text, LONGEST - 5)} ({len(found) + 1})"
        found[name] = text
    return found


def _elided(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 12]}…{text[-11:]}"


def apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The heights moved as little as keeps them `gap` apart, within [low, high] where that is wide enough."""
    order = np.argsort(heights, kind="stable")
    wanted = np.clip(np.asarray(heights, dtype=float)[order], low, high)
    # Least squares with an order: neighbours that are too close share their mean place.
    offset = gap * np.arange(len(wanted))
    blocks: list[list[float]] = []
    for value in wanted - offset:
        blocks.append([float(value), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            last, before = blocks.pop(), blocks.pop()
            weight = before[1] + last[1]
            blocks.append([(before[0] * before[1] + last[0] * last[1]) / weight, weight])
    placed = np.repeat([value for value, _ in blocks], [int(n) for _, n in blocks]) + offset
    placed -= max(float(placed.max(initial=low)) - high, 0.0)
    found = np.empty(len(placed))
    found[order] = np.maximum(placed, low + offset)
    return found.tolist()


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], points: float = 11.0) -> None:
    """Name lines at the right edge of the frame, from (height in data, text, colour), kept apart."""
    if not ends:
        return
    height = axes.bbox.height / axes.figure.dpi * 72
    to_axes = axes.transLimits.transform
    scaled = axes.transScale.transform
    heights = [float(to_axes(scaled((axes.get_xlim()[0], height)))[1]) for height, _, _ in ends]
    gap = points / height
    for place, (_, text, colour) in zip(apart(heights, gap, gap / 2, 1 - gap / 2), ends, strict=True):
        axes.annotate(
            text,
            (1.012, place),
            xycoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
        )
