"""What is claimed of two recipes, in words: one claim in a few, or a pair in a sentence."""

from __future__ import annotations

from scalerl.forecast.comparison import Claim, Pair
from scalerl.view.numbers import p_value
from scalerl.view.table import difference_cell

MOVED = {
    "higher at the compute seen": ("higher", "is higher at the compute seen"),
    "lower at the compute seen": ("lower", "is lower at the compute seen"),
    "higher ceiling": ("higher", "raises the ceiling"),
    "lower ceiling": ("lower", "lowers the ceiling"),
    "reaches it sooner": ("sooner", "gets to 3/4 of its own gain sooner"),
    "reaches it later": ("later", "gets to 3/4 of its own gain later"),
}
"""Verdicts by their adverb and their verb."""
_OF = {
    "pass_rate_seen": ("pass rate at the compute seen", "pass rate", "pass rate"),
    "A": ("ceiling", "A", "A"),
    "compute_to_own": ("efficiency", "compute", "compute to 3/4 of its own gain"),
}
"""What a claim is about by its quantity: in a sentence, and the number once it is known of what, and else."""


def is_made(claim: Claim) -> bool:
    """Return whether a claim is that something moved."""
    return claim.verdict not in ("not significant", "inconclusive")


def pair_text(pair: Pair) -> str:
    """Return all claims on a pair as a sentence that goes on after the name of its recipe."""
    claims = tuple(pair.claims.values())
    if all(claim.verdict == "not significant" for claim in claims):
        found = (f"in the {_OF[name][0]} ({_would_tell(pair, name)})" for name in pair.claims)
        return f"does not differ significantly from {pair.base}, neither {' nor '.join(found)}."
    if all(claim.verdict == "inconclusive" for claim in claims):
        return f"is inconclusive: {'; '.join(dict.fromkeys(claim.why for claim in claims))}."
    moved_first = sorted(pair.claims, key=lambda name: is_made(pair.claims[name]), reverse=True)
    return f"{'; '.join(_claim_sentence(pair, name) for name in moved_first)}."


def claim_text(claim: Claim) -> str:
    """Return a claim in a few words: `higher, p .001`; `p .840, 40 seeds` (that would detect it)."""
    if claim.verdict == "inconclusive":
        return "inconclusive"
    if claim.verdict in MOVED:
        return f"{MOVED[claim.verdict][0]}, {_p(claim)}"
    seeds = ">100" if claim.seeds is None else str(claim.seeds)
    return f"{_p(claim)}, {seeds} seed{'s' * (claim.seeds != 1)}"


def _claim_sentence(pair: Pair, name: str) -> str:
    claim, (what, number, _) = pair.claims[name], _OF[name]
    if claim.verdict == "inconclusive":
        return f"its {what} is inconclusive: {claim.why}"
    if not is_made(claim):
        return f"the difference in {what} is not significant ({_would_tell(pair, name)})"
    return f"{MOVED[claim.verdict][1]}: {number} {_difference(pair, name)}, adjusted {_p(claim)}"


def _would_tell(pair: Pair, name: str) -> str:
    """Describe the difference that was found, and how many seeds would detect it."""
    return f"{_OF[name][2]} {_difference(pair, name)}, {claim_text(pair.claims[name])} would tell"


def _difference(pair: Pair, name: str) -> str:
    return difference_cell(pair.differences[name]).whole


def _p(claim: Claim) -> str:
    return f"p {p_value(claim.p_adjusted)}".replace("p <", "p < ")
