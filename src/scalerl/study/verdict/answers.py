"""The answer of a study in sentences: what moves the ceiling, what the efficiency, and what none."""

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
    "seen": "Differs at the compute seen",
    "noise": "No significant difference",
    "inconclusive": "Inconclusive",
    "not compared": "Not compared",
}
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
    kind, claims = kind_of(pair), tuple(pair.claims.values())
    if kind == "noise":
        found = (f"in the {_OF[name][0]} ({_would_tell(pair, name)})" for name in pair.claims)
        text = f"does not differ significantly from {pair.base}, neither {' nor '.join(found)}"
    elif all(claim.verdict == "inconclusive" for claim in claims):
        why = "; ".join(dict.fromkeys(claim.why for claim in claims))
        return Answer(arm.name, kind, f"is inconclusive: {why}.{_measured(verdict, arm)}")
    else:
        moved_first = sorted(pair.claims, key=lambda name: is_made(pair.claims[name]), reverse=True)
        text = "; ".join(_claim_sentence(pair, name) for name in moved_first)
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
