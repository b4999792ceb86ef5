"""The ceiling and the alarms of a run in words, and the claims about a pair of recipes.

For the ceiling: its interval, or why there is none and at what compute it is expected to be identified. For a
pair: one claim in a few words, or the answers to all questions in a line.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.curve.misfit import IN_WORDS
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, counted
from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.numbers import (
    DASH,
    Unit,
    as_float,
    as_mapping,
    p_value,
    pair,
    plain,
    rate,
    rate_interval,
    unit_for,
)
from scalerl.record.alarms import Alarm
from scalerl.record.reader import RunRecord
from scalerl.view.table import Cell, Table, difference_cell, row

_ROUNDING = 1e-9
"""Tolerance that keeps the evaluations at the ends of the part that holds, after a logarithm's rounding."""

_LONGEST_LIST = 3
"""Number of alarms that are named; the others are counted."""
NOT_CHECKED = "not checked"
WHO_CHECKS = "only the trainer of scalerl looks for alarms"
Notice = tuple[str, str]
"""A fact that a reader must know before any number: in a few words, and in full."""


def ceiling_text(fit_json: Mapping[str, Any], known: float = math.nan) -> str:
    """Return the median of A with its interval, and whether the ceiling `known` beforehand lies inside.

    A forecast stored without medians has only its interval. A is withheld if no family of curves describes
    the run.
    """
    A = as_float(as_mapping(fit_json.get("median")).get("A"))
    lo, hi = pair(as_mapping(fit_json.get("intervals")).get("A"))
    text = f"withheld: {misfit_in_words(kind)}" if (kind := fit_json.get("lack_of_fit")) else "not fitted"
    if math.isfinite(lo + hi):
        text = f"{rate(A)} {rate_interval((lo, hi))}".removeprefix(f"{DASH} ")
        text += "" if fit_json.get("identified", True) else ", not identified"
    if math.isfinite(known):
        text += f"; known beforehand {rate(known)}"
        if math.isfinite(lo + hi):
            text += ": inside" if lo <= known <= hi else ": outside"
    return text


def misfit_in_words(kind: str | None) -> str:
    """Return why no family describes the run, from `Fit.lack_of_fit`; empty if one does."""
    return IN_WORDS.get(str(kind), str(kind)) if kind else ""


def to_tell_text(fit_json: Mapping[str, Any], unit: Unit, spent: float = math.nan) -> str:
    """Return the compute at which the ceiling is expected to be identified; empty if it is already.

    `spent` is the compute so far, in units of the axis; if given, the text also names the multiple.
    """
    identified = fit_json.get("identified") is not False
    ending = as_mapping(fit_json.get("left_out")).get("ending")
    if identified or fit_json.get("lack_of_fit") or ending or "compute_to_identify" not in fit_json:
        return ""
    compute = as_float(fit_json["compute_to_identify"])
    if not math.isfinite(compute):
        return "not expected within 8 times the compute so far"
    times = f" ({plain(compute / spent)} times the compute so far)" if spent > 0 else ""
    return f"about {unit.show(compute)} in all{times}"


def notices(fit: Fit, part: Fit | None) -> list[Notice]:
    """Return the notices above all numbers of the fit to the whole run; `part` is the `part_that_holds`."""
    spent = float(fit.points.compute_N[-1])
    unit = unit_for(fit.axis, spent)
    if fit.metric.no_verdict:
        return [("The curve is that of a training reward.", sentence(fit.metric.no_verdict))]
    if fit.ending:
        title = "may have failed" if fit.ending == fit.newest_failed else "has no number"
        return [(f"The newest evaluation {title}.", sentence(fit.ending))]
    if fit.misfit is not None:
        text = f"{sentence(fit.misfit.why)} The ceiling of the whole run is withheld."
        if part is not None and fit.misfit.keep is not None:
            low, high = (plain(end / unit.size) for end in fit.misfit.keep)
            ceiling = ceiling_text(part.to_json())
            text += f" The part from {low} to {high} {unit.name} is fitted alone: ceiling A {ceiling}."
        return [("No saturating curve describes this run.", text)]
    if fit.identified:
        return []
    needed = f"To identify it: {to_tell_text(fit.to_json(), unit, spent)}."
    return [("Too early to tell the ceiling.", f"{sentence(fit.why)} {needed}")]


def part_that_holds(fit: Fit) -> Fit | None:
    """Fit the part of a run that saturating curves describe; None if there is no such part."""
    from scalerl.curve import fit as fit_curve

    if fit.misfit is None or fit.misfit.keep is None:
        return None
    low, high = fit.misfit.keep[0] * (1 - _ROUNDING), fit.misfit.keep[1] * (1 + _ROUNDING)
    # Not by min_compute, which would keep step 0, although it was evaluated differently after a jump.
    part = fit.points.select((fit.points.compute_N >= low) & (fit.points.compute_N <= high))
    r0 = fit.r0_value if fit.r0_source == "given" else None
    prior = "flat" if fit.prior == "flat" else "default"  # a prior from siblings is not known here
    try:
        return fit_curve(part, r0=r0, level=fit.intervals.level, prior=prior)
    except CannotAnswerError:
        return None  # the part is too short, or does not rise under a flat prior


def sentence(text: str) -> str:
    """Return a reason as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}."


def health_text(run: RunRecord | None) -> str:
    """Return all alarms in one line, `none`, or `NOT_CHECKED`."""
    return (alarm_text(run.alarms) or "none") if run is not None and run.health_is_watched else NOT_CHECKED


def alarm_table(alarms: Sequence[Alarm]) -> Table:
    """Return a table with a row for every alarm and warning, alarms first."""
    prose = ("level", "figure", "when")
    rows = []
    for alarm in sorted(alarms, key=lambda alarm: not alarm.is_alarm):
        numbers = plain(alarm.worst), plain(alarm.threshold)
        rows.append(row(alarm.level, alarm.metric.replace("_", " "), alarm.steps, *numbers))
    return Table("alarms", "Alarms and warnings", (*prose, "worst", "threshold"), tuple(rows), prose=prose)


def alarm_notices(alarms: Sequence[Alarm]) -> list[Notice]:
    """Return the notice about alarms for the head of the page; warnings do not make one."""
    if not (found := [alarm for alarm in alarms if alarm.is_alarm]):
        return []
    title = "A health alarm." if len(found) == 1 else f"{len(found)} health alarms."
    return [(title, f"{_list(found)}. The curve may not be the same before and after.")]


def alarm_text(alarms: Sequence[Alarm]) -> str:
    """Return all alarms and warnings in one line; empty without any."""
    found = [alarm for alarm in alarms if alarm.is_alarm]
    counts = ((len(found), "alarm"), (len(alarms) - len(found), "warning"))
    in_words = ", ".join(counted(n, name) for n, name in counts if n)
    return f"{in_words}: {_list(found or alarms)}" if alarms else ""


def _list(alarms: Sequence[Alarm]) -> str:
    named = "; ".join(map(str, alarms[:_LONGEST_LIST]))
    return named + (f"; and {len(alarms) - _LONGEST_LIST} more" if len(alarms) > _LONGEST_LIST else "")


MOVED = {
    **dict.fromkeys(("higher at the compute seen", "higher as measured", "higher ceiling"), "higher"),
    **dict.fromkeys(("lower at the compute seen", "lower as measured", "lower ceiling"), "lower"),
    **{"reaches it sooner": "sooner", "reaches it later": "later"},
}
"""The adverb of each verdict."""
_OF = {
    "pass_rate_seen": "at the compute seen",
    "A": "ceiling A",
    "compute_to_own": "compute to 3/4 of its own gain",
}
"""The subject of a claim, by its quantity."""


def is_made(claim: Claim) -> bool:
    """Return whether a claim states a difference."""
    return claim.verdict not in ("not significant", "inconclusive")


def pair_text(pair: Pair, measured: str, by_curves: bool) -> str:
    """Return the answers to three questions about a pair, each with its number, in one line.

    `measured` is the measured answer to the first question. If it is empty, the answer by the curves replaces
    it; with `by_curves`, both are given.
    """
    claims = pair.claims
    whys = list(dict.fromkeys(claim.why for claim in claims.values()))
    if all(claim.verdict == "inconclusive" for claim in claims.values()) and len(whys) == 1:
        return f"inconclusive: {whys[0]}{f'; {measured}' if measured else ''}."
    found = [question_text(_OF[name], pair.differences.get(name), claim) for name, claim in claims.items()]
    first = [measured] * bool(measured) + found[:1] * (by_curves or not measured)
    return f"{'; '.join([*first, *found[1:]])}."


def question_text(what: str, difference: Difference | None, claim: Claim) -> str:
    """Return one answer: `ceiling A +0.06 [−0.02, +0.15], not significant (p 0.2; 49 seeds would detect it)`.

    An inconclusive answer still has a number, as far as it is known.
    """
    shown = f"{what} {difference_cell(difference, 'withheld').whole}"
    if claim.verdict == "inconclusive":
        return f"{shown}, inconclusive{f' ({_p(claim)})' if claim.p is not None else ''}: {claim.why}"
    if is_made(claim):
        return f"{shown}, {MOVED[claim.verdict]} ({_p(claim)})"
    return f"{shown}, not significant ({_p(claim)}; {_seeds(claim)} would detect it)"


def claim_text(claim: Claim) -> str:
    """Return a claim in a few words: `higher, p 0.001`; `p 0.840, 40 seeds` (that would detect it)."""
    if claim.verdict == "inconclusive":
        return "inconclusive"
    return f"{MOVED[claim.verdict]}, {_p(claim)}" if is_made(claim) else f"{_p(claim)}, {_seeds(claim)}"


def question_cell(
    difference: Difference | None, claim: Claim | None, without: str = "withheld", *more: str
) -> Cell:
    """Return the answer to one question: the difference, and beside it the interval, `more` and the claim."""
    cell = difference_cell(difference, without)
    said = claim_text(claim) if claim and difference else ""
    return Cell(cell.text, "\n".join(filter(None, [cell.beside, *more, said])))


def _seeds(claim: Claim) -> str:
    return ">100 seeds" if claim.seeds is None else f"{claim.seeds} seed{'s' * (claim.seeds != 1)}"


def _p(claim: Claim) -> str:
    return f"p {p_value(claim.p_adjusted)}".replace("p <", "p < ")
