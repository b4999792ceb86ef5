"""The answer of a study in sentences: what moves the ceiling, what the efficiency, and what none."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.study.verdict.arm_fits import ArmSummary, last_gains
from scalerl.study.verdict.verdict import Kind, StudyVerdict, kind_of
from scalerl.view.facts.claims import pair_text
from scalerl.view.numbers import signed, unit_for
from scalerl.view.table import rate_cell

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
    text = pair_text(pair)
    if all(claim.verdict == "inconclusive" for claim in pair.claims.values()):
        text += _measured(verdict, arm)
    return Answer(arm.name, kind_of(pair), text)


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
