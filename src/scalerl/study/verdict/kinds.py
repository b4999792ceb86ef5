"""What the two claims on an arm come to: the verdict in a word."""

from __future__ import annotations

from typing import Literal

from scalerl.forecast.comparison import Claim, Pair

Kind = Literal["base", "both", "ceiling", "efficiency", "noise", "inconclusive", "not compared"]

WORDS: dict[Kind, str] = {
    "base": "the base",
    "both": "moves the ceiling and the efficiency",
    "ceiling": "moves the ceiling",
    "efficiency": "moves the efficiency",
    "noise": "not significant",
    "inconclusive": "inconclusive",
    "not compared": "not compared",
}
"""The verdict on an arm in a few words, in the order in which a page gives them."""


def is_made(claim: Claim) -> bool:
    """Whether something is claimed."""
    return claim.verdict not in ("not significant", "inconclusive")


def kind_of(pair: Pair) -> Kind:
    """What a pair's two claims come to."""
    ceiling, efficiency = (is_made(claim) for claim in (pair.ceiling, pair.efficiency))
    if ceiling and efficiency:
        return "both"
    if ceiling or efficiency:
        return "ceiling" if ceiling else "efficiency"
    return "inconclusive" if "inconclusive" in (pair.ceiling.verdict, pair.efficiency.verdict) else "noise"
