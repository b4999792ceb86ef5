"""The answer of a study in sentences: what moves the ceiling, what the efficiency, and what is noise."""

from __future__ import annotations

from dataclasses import dataclass

from scalerl.forecast.comparison import Claim, Pair
from scalerl.study.verdict.arm_fits import ArmSummary
from scalerl.study.verdict.best import last_gains
from scalerl.study.verdict.kinds import Kind, is_made, kind_of
from scalerl.study.verdict.verdict import StudyVerdict
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
    "higher ceiling": "raises the ceiling",
    "lower ceiling": "lowers the ceiling",
    "reaches it sooner": "gets to 3/4 of its own gain sooner",
    "reaches it later": "gets to 3/4 of its own gain later",
}
ADVERBS = {
    "higher ceiling": "higher",
    "lower ceiling": "lower",
    "reaches it sooner": "sooner",
    "reaches it later": "later",
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
    """One for every arm, in the order of the plan."""
    return [_answer(verdict, arm) for arm in verdict.arms]


def claim_text(claim: Claim) -> str:
    """A claim in a few words: `higher, p .001`; `p .840, 40 seeds` (that would tell); `inconclusive`."""
    if claim.verdict == "inconclusive":
        return "inconclusive"
    p = _p(claim)
    if claim.verdict in ADVERBS:
        return f"{ADVERBS[claim.verdict]}, {p}"
    return f"{p}, {_seeds(claim)}"


def _answer(verdict: StudyVerdict, arm: ArmSummary) -> Answer:
    if arm.name == verdict.study.plan["base"]:
        return Answer(arm.name, "base", _base_text(verdict, arm))
    pair = verdict.pairs.get(arm.name)
    if pair is None:
        why = verdict.not_compared.get(arm.name, "no comparison was made")
        gain = last_gains(verdict.study).get(arm.name)
        measured = (
            f" Its last pass rate was {signed(gain)} from that of the base." if gain is not None else ""
        )
        return Answer(arm.name, "not compared", f"is not compared: {why}.{measured}")
    kind = kind_of(pair)
    claims = pair.ceiling, pair.efficiency
    if kind == "noise":
        return Answer(arm.name, kind, _noise_text(pair))
    if all(claim.verdict == "inconclusive" for claim in claims):
        reasons = "; ".join(dict.fromkeys(claim.why for claim in claims))
        return Answer(arm.name, kind, f"is inconclusive: {reasons}.")
    # What moves comes first.
    parts = [_moved_text(pair, claim) for claim in claims if is_made(claim)]
    parts += [_open_text(pair, claim) for claim in claims if not is_made(claim)]
    return Answer(arm.name, kind, f"{'; '.join(parts)}.")


def _base_text(verdict: StudyVerdict, arm: ArmSummary) -> str:
    found = [
        f"{label} {rate_cell(arm.quantities[key]).whole}"
        for key, label in (("A", "ceiling A"), ("pass_rate", f"pass rate at {budget_text(verdict)}"))
        if key in arm.quantities
    ]
    why = verdict.not_compared.get(arm.name)
    found += [why] if why else []
    return "is what the others are compared with" + (f": {', '.join(found)}." if found else ".")


def budget_text(verdict: StudyVerdict) -> str:
    """The compute at which pass rates are compared, with its unit."""
    return unit_for(verdict.axis, verdict.budget).show(verdict.budget)


def _moved_text(pair: Pair, claim: Claim) -> str:
    what = "A" if claim is pair.ceiling else "compute"
    return f"{MOVED[claim.verdict]}: {what} {_difference(pair, claim)}, adjusted {_p(claim)}"


def _open_text(pair: Pair, claim: Claim) -> str:
    what = "ceiling" if claim is pair.ceiling else "efficiency"
    if claim.verdict == "inconclusive":
        return f"its {what} is inconclusive: {claim.why}"
    return f"the difference in {what} is not significant ({_would_tell(pair, claim)})"


def _noise_text(pair: Pair) -> str:
    ceiling, efficiency = _would_tell(pair, pair.ceiling), _would_tell(pair, pair.efficiency)
    return (
        f"does not differ significantly from {pair.base}, neither in the ceiling ({ceiling}) "
        f"nor in the efficiency ({efficiency})."
    )


def _would_tell(pair: Pair, claim: Claim) -> str:
    """The difference that was found, and how many seeds would tell it."""
    what = "A" if claim is pair.ceiling else "compute to 3/4 of its own gain"
    return f"{what} {_difference(pair, claim)}, {claim_text(claim)} would tell"


def _difference(pair: Pair, claim: Claim) -> str:
    return difference_cell(pair.differences["A" if claim is pair.ceiling else "compute_to_own"]).whole


def _p(claim: Claim) -> str:
    return f"p {p_value(claim.p_adjusted)}".replace("p <", "p < ")


def _seeds(claim: Claim) -> str:
    if claim.seeds is None:
        return ">100 seeds"
    return f"{claim.seeds} seed{'s' * (claim.seeds != 1)}"
