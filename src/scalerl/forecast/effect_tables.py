"""The answer of a factorial: effects of switches and of pairs of them, as a table and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from scalerl.curve.answers import span
from scalerl.curve.quantiles import Interval
from scalerl.forecast.comparison import Verdict
from scalerl.jsonl import plain


@dataclass(frozen=True)
class Effect:
    """One main effect, or the sum of the interactions of one chain: on less off (see the module).

    `of` has the switches: (("a",),) for a main effect, (("a", "b"), ("c", "d")) for a chain of two.
    """

    of: tuple[tuple[str, ...], ...]
    median: float
    interval: Interval
    p: float
    """Two-sided posterior tail mass at no effect."""
    p_adjusted: float
    verdict: Verdict

    @property
    def name(self) -> str:
        """The switch; or the interactions, which the data cannot tell apart."""
        return " + ".join(" x ".join(switches) for switches in self.of)

    @property
    def is_main(self) -> bool:
        """Whether it is a main effect."""
        return len(self.of[0]) == 1


@dataclass(frozen=True)
class OnParameter:
    """All effects on one parameter: A in pass rate, or log C_mid (natural logarithm: -.10 is 10 % sooner)."""

    parameter: str
    effects: tuple[Effect, ...]
    """Main effects in the order of the factors, then interactions."""
    tau: float
    """Root mean square of what a seed does to one run, beside what it does to its whole block."""
    main_scale: float
    """Root mean square of main effects."""
    interaction_scale: float
    """NaN where there are no interactions."""


@dataclass(frozen=True)
class Effects:
    """The answer of a factorial. Made by `effects`."""

    factors: tuple[str, ...]
    runs: int
    level: float
    on: tuple[OnParameter, ...]
    left_out: tuple[str, ...]
    """Runs that no curve describes."""
    cautions: tuple[str, ...]
    """What the design or its gaps cannot tell, in sentences."""

    def main(self, factor: str, parameter: str = "A") -> Effect:
        """The main effect of one switch."""
        (on,) = (on for on in self.on if on.parameter == parameter)
        return next(effect for effect in on.effects if effect.of == ((factor,),))

    def to_json(self) -> dict[str, Any]:
        """Everything, in what JSON has."""
        return plain(asdict(self))

    def __str__(self) -> str:
        blocks = [_table(on, self.level) for on in self.on]
        return "\n\n".join([*blocks, "\n".join([_FOOT, *self.cautions])])


_FOOT = (
    "An effect is the mean with the switch on less that with it off, over the settings of the others; a x b "
    "is half of what a does with b on less what it does with b off. What is joined by + cannot be told apart."
)
_TITLES = {"A": "ceiling A, in pass rate", "log_C_mid": "C_mid, as a ratio"}


def _table(on: OnParameter, level: float) -> str:
    width = max(len(effect.name) for effect in on.effects)
    rows = [f"{_TITLES[on.parameter]}: median, {level:.0%} interval, p, adjusted p"]
    for effect in on.effects:
        if on.parameter == "A":
            value = f"{effect.median:+.4f} {span(effect.interval, '+.4f')}"
        else:
            low, high = effect.interval
            value = f"x{math.exp(effect.median):.3f} {span((math.exp(low), math.exp(high)), '.3f')}"
        p = f"p {effect.p:.3g}, adjusted {effect.p_adjusted:.3g}"
        rows.append(f"  {effect.name:<{width}}  {value}  {p}  {effect.verdict.upper()}")
    return "\n".join([*rows, f"  seeds differ by {on.tau:.3g} within a block"])
