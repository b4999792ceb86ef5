"""The look of every figure: palette, font, labels, and SVG that takes its colours from the page.

Figures are drawn with the light palette. In a page each colour becomes a CSS variable, so that one SVG serves
light, dark and print; a figure saved as a file keeps its colours.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.errors import InputError
from scalerl.files import write_atomically, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1f24"
MUTED = "#68717d"
GRID = "#e4e7eb"
WINDOW = "#f2f4f6"
PAPER = "#fffffe"
# Okabe and Ito's blue, vermilion and green, distinct under every common colour deficiency.
FORECAST = "#0072b2"
LATER = "#d55e00"
CEILING = "#00805c"
# For longer series, two more that stay distinct from these: Tol's purple, and a sky blue.
PURPLE = "#aa4499"
SKY = "#2a95d5"

RUN_LOOKS = ((FORECAST, "o"), (LATER, "s"), (CEILING, "^"), (PURPLE, "D"), (INK, "v"), (SKY, "P"))
"""Colour and marker, as in the chart of a page (scalerl/view/web/marks.js): distinct under every common
colour deficiency, and in grey."""
DASHES = ("-", "--", ":", "-.")
LONGEST = 26
"""Most letters of a name in a figure."""

_VARIABLES = {
    **{INK: "ink", MUTED: "muted", GRID: "grid", WINDOW: "window", PAPER: "paper"},
    **{FORECAST: "forecast", LATER: "later", CEILING: "ceiling", PURPLE: "purple", SKY: "sky"},
}
"""The CSS variable of each colour, as in templates/look.html."""

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def style() -> AbstractContextManager[None]:
    """Return a context with the matplotlib settings of all figures; global settings are restored after it."""
    import matplotlib
    from cycler import cycler

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "scalerl",  # makes ids, and so the text, a function of the content
            "font.family": ["DejaVu Sans"],  # comes with matplotlib, so the layout is the same everywhere
            "font.size": 9,
            "axes.titlesize": 9.5,
            "text.parse_math": False,  # a dollar in a prompt id is a dollar
            "text.color": INK,
            "axes.prop_cycle": cycler(color=[FORECAST, LATER, CEILING]),
            "axes.labelcolor": MUTED,
            "axes.edgecolor": MUTED,
            "axes.linewidth": 0.7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "figure.facecolor": PAPER,
            "axes.facecolor": PAPER,
        }
    )


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure that is independent of pyplot and its global state.

    Callers set the margins themselves: matplotlib's fitted layouts are slow, and differ in the last digits
    from call to call.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in))


def plain_rates(axes: Axes, axis: Any = None) -> None:
    """Set ticks for pass rates on the vertical axis or the given one, with 2 or 3 decimals."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axis or axes.yaxis
    low, high = axis.get_view_interval()
    digits = 2 if high - low > 0.05 else 3
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{digits}f}"))


def inline_svg(figure: Figure, name: str, described: str, themed: bool = True) -> str:
    """Return the figure as an `<svg>` element, with ids prefixed by `name` and without namespace or prolog.

    `described` is the text for screen readers. If not `themed`, colours do not become CSS variables.
    """
    svg = _svg(figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    for colour, variable in _VARIABLES.items() if themed else ():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(described)}" ', 1)


def run_look(place: int) -> tuple[str, str, str]:
    """Return colour, marker and dashes of the run at a position, as in the chart of a page."""
    turn, colour = divmod(place, len(RUN_LOOKS))
    marker = RUN_LOOKS[(place + turn) % len(RUN_LOOKS)][1]
    return RUN_LOOKS[colour][0], marker, DASHES[turn % len(DASHES)]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten names to fit beside a figure, all distinct; the tables have the full names.

    Long names lose the tables of their fields (`optimiser.lr=1e-4` becomes `lr=1e-4`), then their middle.
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


FIGURES = (".svg", ".png", ".pdf")
"""Endings of the files of a figure."""


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as `.svg`, as `.pdf`, or as `.png` at 200 dots per inch.

    Raises:
        InputError: the name has another ending.
        WriteError: the file cannot be written.
    """
    if path.suffix not in FIGURES:
        raise InputError(f"{path}: a figure is written as {', '.join(FIGURES[:-1])} or {FIGURES[-1]}")
    with writing(path), style():
        if path.suffix == ".svg":
            write_atomically(path, _svg(figure))
        else:
            dated: Any = {"CreationDate": None} if path.suffix == ".pdf" else None
            figure.savefig(path, dpi=200, metadata=dated)
    return path


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style():
        figure.savefig(buffer, format="svg", metadata=nothing)
    return re.sub(r"font-family: [^;\"]+", f"font-family: {FONTS}", buffer.getvalue())
