"""The answer of a study in lines: of every arm what was measured, its ceiling and its efficiency."""

from dataclasses import dataclass

from scalerl.study.verdict.arm_fits import ArmSummary, last_gains
from scalerl.study.verdict.verdict import WORDS, Kind, StudyVerdict
from scalerl.view.facts.notices import pair_text, question_text
from scalerl.view.numbers import signed, unit_for
from scalerl.view.table import rate_cell

HEADINGS: dict[Kind, str] = {kind: f"{text[0].upper()}{text[1:]}" for kind, text in WORDS.items()}
"""The verdicts as headings, in the order of the page."""


@dataclass(frozen=True)
class Answer:
    """The verdict on one arm; `text` stands after its name."""

    arm: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.arm}: {self.text}"


def answers(verdict: StudyVerdict) -> list[Answer]:
    """Return one answer for every arm, in the order of the plan."""
    return [_answer(verdict, arm) for arm in verdict.arms]


def budget_text(verdict: StudyVerdict) -> str:
    """Return the compute at which pass rates are compared, with its unit."""
    return unit_for(verdict.axis, verdict.budget).show(verdict.budget)


def _answer(verdict: StudyVerdict, arm: ArmSummary) -> Answer:
    kind, pair = verdict.kind(arm.name), verdict.pairs.get(arm.name)
    if kind == "base":
        return Answer(arm.name, kind, _base_text(verdict, arm))
    if kind == "never acted":
        return Answer(
            arm.name,
            kind,
            "the runs of the base, evaluation for evaluation and step for step: what it changes never acted.",
        )
    if why := verdict.still.get(arm.name):
        return Answer(arm.name, kind, f"{why}: the study says nothing of the arm.")
    measured = _measured(verdict, arm)
    if pair is None:
        why = verdict.not_compared.get(arm.name, "no comparison was made")
        return Answer(arm.name, kind, f"not compared: {why}{measured and f'; {measured}'}.")
    return Answer(arm.name, kind, pair_text(pair, measured))


def _measured(verdict: StudyVerdict, arm: ArmSummary) -> str:
    """Return what was measured at the budget, or of fewer seeds the last evaluations; else nothing."""
    if found := verdict.measured.get(arm.name):
        return question_text(f"measured at {budget_text(verdict)}", found.difference, found.claim)
    gain = last_gains(verdict.study).get(arm.name)
    return "" if gain is None else f"its last pass rate was {signed(gain)} from that of the base"


def _base_text(verdict: StudyVerdict, arm: ArmSummary) -> str:
    if why := verdict.still.get(arm.name):  # a ceiling would be that of the prior
        return f"what the others are compared with: {why}."
    found = [
        f"{label} {rate_cell(arm.quantities[key]).whole}"
        for key, label in (("A", "ceiling A"), ("pass_rate", f"pass rate at {budget_text(verdict)}"))
        if key in arm.quantities
    ]
    why = verdict.not_compared.get(arm.name)
    found += [why] if why else []
    return "what the others are compared with" + (f": {', '.join(found)}." if found else ".")
