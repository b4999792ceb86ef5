"""The answer of a study in sentences: what moves the ceiling, what the efficiency, and what neither."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.forecast.comparison import Claim, Pair
from scalerl.study.verdict.arm_fits import ArmSummary, last_gains
from scalerl.study.verdict.verdict import Kind, StudyVerdict, is_made, kind_of
from scalerl.view.numbers import p_value, signed, unit_for
from scalerl.view.table import difference_cell, rate_cell

HEADINGS: dict[Kind, str] = {
    "base": "The base",
    "both": "Moves the ceiling and the efficiency",
    "ceiling": "Moves the ceiling",
    "efficiency": "Moves the efficiency",
    "noise": "No significant difference",
    "inconclusive": "Inconclusive",
    "not compared": "Not compared",
}
MOVED = {
    "higher ceiling": ("higher", "raises the ceiling"),
    "lower ceiling": ("lower", "lowers the ceiling"),
    "reaches it sooner": ("sooner", "gets to 3/4 of its own gain sooner"),
    "reaches it later": ("later", "gets to 3/4 of its own gain later"),
}
"""Verdicts by their adverb and their verb."""


@dataclass(frozen=True)
class Answer:
    """The verdict on one arm; `text` goes on after its name."""

    arm: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.arm} {self.text}"


def answers(verdict: StudyVerdict) -> list[Answer]:
    """Return one answer for every arm, in the order of the plan."""
    return [_answer(verdict, arm) for arm in verdict.arms]


def claim_text(claim: Claim) -> str:
    """Return a claim in a few words: `higher, p .001`; `p .840, 40 seeds` (that would detect it)."""
    if claim.verdict == "inconclusive":
        return "inconclusive"
    if claim.verdict in MOVED:
        return f"{MOVED[claim.verdict][0]}, {_p(claim)}"
    seeds = ">100" if claim.seeds is None else str(claim.seeds)
    return f"{_p(claim)}, {seeds} seed{'s' * (claim.seeds != 1)}"


def budget_text(verdict: StudyVerdict) -> str:
    """Return the compute at which pass rates are compared, with its unit."""
    return unit_for(verdict.axis, verdict.budget).show(verdict.budget)


def _answer(verdict: StudyVerdict, arm: ArmSummary) -> Answer:
    if arm.name == verdict.study.plan["base"]:
        return Answer(arm.name, "base", _base_text(verdict, arm))
    pair = verdict.pairs.get(arm.name)
    if pair is None:
        why = verdict.not_compared.get(arm.name, "no comparison was made")
        return Answer(arm.name, "not compared", f"is not compared: {why}.{_measured(verdict, arm)}")
    kind, claims = kind_of(pair), (pair.ceiling, pair.efficiency)
    if kind == "noise":
        ceiling, efficiency = (_would_tell(pair, claim) for claim in claims)
        text = (
            f"does not differ significantly from {pair.base}, neither in the ceiling ({ceiling}) "
            f"nor in the efficiency ({efficiency})"
        )
    elif all(claim.verdict == "inconclusive" for claim in claims):
        why = "; ".join(dict.fromkeys(claim.why for claim in claims))
        return Answer(arm.name, kind, f"is inconclusive: {why}.{_measured(verdict, arm)}")
    else:
        moved_first = sorted(claims, key=is_made, reverse=True)
        text = "; ".join(_claim_sentence(pair, claim) for claim in moved_first)
    return Answer(arm.name, kind, f"{text}.")


def _measured(verdict: StudyVerdict, arm: ArmSummary) -> str:
    """Return a sentence on the last evaluations, for an arm of which the curves tell nothing."""
    gain = last_gains(verdict.study).get(arm.name)
    return "" if gain is None else f" Its last pass rate was {signed(gain)} from that of the base."


def _base_text(verdict: StudyVerdict, arm: ArmSummary) -> str:
    found = [
        f"{label} {rate_cell(arm.quantities[key]).whole}"
        for key, label in (("A", "ceiling A"), ("pass_rate", f"pass rate at {budget_text(verdict)}"))
        if key in arm.quantities
    ]
    why = verdict.not_compared.get(arm.name)
    found += [why] if why else []
    return "is what the others are compared with" + (f": {', '.join(found)}." if found else ".")


def _claim_sentence(pair: Pair, claim: Claim) -> str:
    what = "ceiling" if claim is pair.ceiling else "efficiency"
    if claim.verdict == "inconclusive":
        return f"its {what} is inconclusive: {claim.why}"
    if not is_made(claim):
        return f"the difference in {what} is not significant ({_would_tell(pair, claim)})"
    what = "A" if claim is pair.ceiling else "compute"
    return f"{MOVED[claim.verdict][1]}: {what} {_difference(pair, claim)}, adjusted {_p(claim)}"


def _would_tell(pair: Pair, claim: Claim) -> str:
    """Describe the difference that was found, and how many seeds would detect it."""
    what = "A" if claim is pair.ceiling else "compute to 3/4 of its own gain"
    return f"{what} {_difference(pair, claim)}, {claim_text(claim)} would tell"


def _difference(pair: Pair, claim: Claim) -> str:
    return difference_cell(pair.differences["A" if claim is pair.ceiling else "compute_to_own"]).whole


def _p(claim: Claim) -> str:
    return f"p {p_value(claim.p_adjusted)}".replace("p <", "p < ")
