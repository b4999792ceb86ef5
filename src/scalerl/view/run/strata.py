"""Pass rate by stratum of the held-out prompts, at the start of the run and at its end.

The stratum of a prompt is its id up to the last slash: `chain/7/123` belongs to `chain/7`. Their name on the
page is "strata" in config.json (`chain length`, say).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.view.numbers import as_float, rate
from scalerl.view.style import FORECAST, GRID, INK, MUTED, PAPER, inline_svg, new_figure, note, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 40
"""More strata than this are listed, and not drawn."""


@dataclass(frozen=True)
class Stratum:
    """A group of held-out prompts: name, size, and pass rate at the first and at the last evaluation."""

    name: str
    n_prompts: int
    start: float
    end: float


def strata(evaluations: Sequence[Mapping[str, Any]]) -> list[Stratum]:
    """Group the held-out prompts of the first and the last line of eval_prompts.jsonl.

    The list is empty with fewer than two strata, or fewer than two evaluations of one prompt set.
    """
    evaluations = [line for line in evaluations if _is_whole(line)]
    if len(evaluations) < 2 or evaluations[0].get("prompt_set") != evaluations[-1].get("prompt_set"):
        return []
    start, end = _rates(evaluations[0]), _rates(evaluations[-1])
    names = sorted(start.keys() & end.keys(), key=_natural)
    if len(names) < 2:
        return []
    return [Stratum(n, len(end[n]), float(np.mean(start[n])), float(np.mean(end[n]))) for n in names]


def strata_svg(groups: Sequence[Stratum], first_step: int, last_step: int) -> str | None:
    """Draw each stratum from its pass rate at `first_step` to that at `last_step`; None if too many."""
    if not 2 <= len(groups) <= _MOST:
        return None
    described = f"Pass rate of {len(groups)} strata of the prompts, at steps {first_step} and {last_step}"
    return inline_svg(_draw(groups, first_step, last_step), "strata", described)


def _draw(groups: Sequence[Stratum], first_step: int, last_step: int) -> Figure:
    with style():
        labels = [f"{group.name}  (n = {group.n_prompts})" for group in groups]
        height_in = 0.95 + 0.27 * len(groups)
        figure = new_figure(10.0, height_in)
        left = min(0.02 + 0.0072 * max(len(label) for label in labels), 0.5)
        figure.subplots_adjust(left=left, right=0.88, bottom=0.5 / height_in, top=0.99)
        axes = figure.subplots()
        for row, group in enumerate(groups):
            axes.plot([group.start, group.end], [row, row], color=GRID, lw=4, zorder=1)
            axes.plot([group.start], [row], "o", ms=6, mfc=PAPER, mec=MUTED, mew=1.3)
            axes.plot([group.end], [row], "o", ms=6.5, color=FORECAST)
            text = f"{rate(group.start)} → {rate(group.end)}"
            note(axes, text, (1.01, row), "y", va="center", color=INK)
        _name_dots(axes, groups[0], first_step, last_step)
        axes.set_yticks(range(len(groups)), labels)
        axes.set_ylim(len(groups) - 0.5, -1.1)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("pass rate")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
    return figure


def _name_dots(axes: Any, group: Stratum, first_step: int, last_step: int) -> None:
    """Label the two dots of the first row, away from each other."""
    start_is_left = group.start <= group.end
    for value, step, colour, is_left in (
        (group.start, first_step, MUTED, start_is_left),
        (group.end, last_step, FORECAST, not start_is_left),
    ):
        # `right` of the text is its own edge: the label of the left dot ends at it.
        look = {"ha": "right" if is_left else "left", "va": "bottom", "color": colour}
        note(axes, f"step {step}", (value, -0.35), "xy", (4 if is_left else -4, 2), **look)


def _is_whole(evaluation: Mapping[str, Any]) -> bool:
    ids, correct = evaluation.get("id"), evaluation.get("correct")
    lists = isinstance(ids, list) and isinstance(correct, list) and len(ids) == len(correct)
    return lists and as_float(evaluation.get("n")) > 0


def _rates(evaluation: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the pass rates of the prompts of one evaluation, by stratum."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, correct in zip(evaluation["id"], evaluation["correct"], strict=True):
        stratum, slash, _ = str(name).rpartition("/")
        if slash:
            found[stratum].append(correct / evaluation["n"])
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `chain/10` after `chain/9`."""
    parts = re.findall(r"\d+|\D+", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
