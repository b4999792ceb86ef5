"""What is claimed of two recipes, in words: one claim in a few, or the questions about a pair in a line."""

from __future__ import annotations

from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.view.numbers import p_value
from scalerl.view.table import difference_cell

MOVED = {
    **dict.fromkeys(("higher at the compute seen", "higher as measured", "higher ceiling"), "higher"),
    **dict.fromkeys(("lower at the compute seen", "lower as measured", "lower ceiling"), "lower"),
    **{"reaches it sooner": "sooner", "reaches it later": "later"},
}
"""Verdicts by their adverb."""
_OF = {
    "pass_rate_seen": "at the compute seen",
    "A": "ceiling A",
    "compute_to_own": "compute to 3/4 of its own gain",
}
"""What a claim is about, by its quantity."""


def is_made(claim: Claim) -> bool:
    """Return whether a claim is that something moved."""
    return claim.verdict not in ("not significant", "inconclusive")


def pair_text(pair: Pair, measured: str = "") -> str:
    """Return the answers to three questions about a pair, each with its number, in one line.

    `measured` is the answer to the first by what was measured, in the place of the one by curves.
    """
    claims = pair.claims
    whys = list(dict.fromkeys(claim.why for claim in claims.values()))
    if all(claim.verdict == "inconclusive" for claim in claims.values()) and len(whys) == 1:
        return f"inconclusive: {whys[0]}{f'; {measured}' if measured else ''}."
    found = [question_text(_OF[name], pair.differences.get(name), claim) for name, claim in claims.items()]
    return f"{'; '.join([measured, *found[1:]] if measured else found)}."


def question_text(what: str, difference: Difference | None, claim: Claim) -> str:
    """Return one answer: `ceiling A +.062 [−.022, +.147], not significant (p .206; 49 seeds would tell)`.

    Of an inconclusive one the number is what is known all the same.
    """
    shown = f"{what} {difference_cell(difference, 'withheld').whole}"
    if claim.verdict == "inconclusive":
        return f"{shown}, inconclusive{f' ({_p(claim)})' if claim.p is not None else ''}: {claim.why}"
    if is_made(claim):
        return f"{shown}, {MOVED[claim.verdict]} ({_p(claim)})"
    return f"{shown}, not significant ({_p(claim)}; {_seeds(claim)} would tell)"


def claim_text(claim: Claim) -> str:
    """Return a claim in a few words: `higher, p .001`; `p .840, 40 seeds` (that would detect it)."""
    if claim.verdict == "inconclusive":
        return "inconclusive"
    return f"{MOVED[claim.verdict]}, {_p(claim)}" if is_made(claim) else f"{_p(claim)}, {_seeds(claim)}"


def _seeds(claim: Claim) -> str:
    return ">100 seeds" if claim.seeds is None else f"{claim.seeds} seed{'s' * (claim.seeds != 1)}"


def _p(claim: Claim) -> str:
    return f"p {p_value(claim.p_adjusted)}".replace("p <", "p < ")
