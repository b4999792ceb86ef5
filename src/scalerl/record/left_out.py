"""Evaluations that were read but do not count: how many, which, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.errors import counted, printable
from scalerl.numbers import percent

NAN, INFINITE, NOT_A_NUMBER = "NaN", "infinite", "not a number"
REPEATED, SUPERSEDED, NO_STEP = "repeated", "superseded", "no step"
BELOW, ABOVE, AT_START = "below min_compute", "above max_compute", "at compute 0"
FAILED = "failed"
APART = "not of all data sets"
NO_EVALUATION = "no evaluation"
"""The reason for NaN in a row that holds no evaluation."""
VALUELESS = (NAN, INFINITE, NOT_A_NUMBER)
"""Reasons for which an evaluation has no pass rate at all."""
MOST = 100
"""Most evaluations that are listed one by one; all are counted."""
_SHOWN = 12
"""Most evaluations that a sentence names."""
_LEAST_GAPS = 3
"""Least NaN values before the last evaluation for them to stand for rows without one."""
_WHY = {
    NAN: "NaN",
    NO_EVALUATION: "no evaluation",
    INFINITE: "infinite",
    NOT_A_NUMBER: "not a number",
    REPEATED: "repeated at a step, of which the last one counts",
    SUPERSEDED: "superseded, as the run was restarted from an earlier step",
    NO_STEP: "whose step is not a whole number of 0 or more",
    BELOW: "below --min-compute",
    ABOVE: "above --max-compute",
    AT_START: "at compute 0, whose place the given R_0 takes",
    APART: "at a step that not all data sets have",
    FAILED: "far off its neighbours, as if it had failed",
}


@dataclass(frozen=True)
class Omitted:
    """One evaluation that does not count; unknown parts of its place are None."""

    reason: str
    step: int | None = None
    line: int | None = None
    """Line, row or record of its file."""


@dataclass(frozen=True)
class LeftOut:
    """The evaluations of one run that do not count."""

    metric: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    """The number of evaluations for each reason."""
    items: tuple[Omitted, ...] = ()
    """The first evaluations of every reason, `MOST` in all."""
    ending: str = ""
    """A sentence if the newest evaluations are not numbers, as the run may have diverged; else empty."""

    @classmethod
    def of(cls, omitted: Iterable[Omitted], metric: str = "", ending: str = "") -> LeftOut:
        """Count evaluations by reason, and list the first of each in the given order."""
        found = list(omitted)
        counts = Counter(one.reason for one in found)
        return cls(metric, tuple(counts.items()), tuple(_shared(found)), ending)

    @classmethod
    def of_log(
        cls, omitted: Sequence[Omitted], at_W: np.ndarray, at_N: np.ndarray, metric: str = ""
    ) -> LeftOut:
        """Count the evaluations of a log, set apart NaN that stands for no evaluation, and add the ending.

        Args:
            omitted: the evaluations that do not count, in the order in which they are listed.
            at_W: their place along the run (step or compute); NaN where it is not known.
            at_N: the place of the evaluations that count.
            metric: the name of the pass rate.
        """
        found = list(omitted)
        nan_W = np.array([one.reason == NAN for one in found], dtype=bool)
        if _are_gaps(at_N, at_W[nan_W]):
            # A table pads rows without an evaluation with NaN; such a run must not seem to diverge.
            found = [replace(one, reason=NO_EVALUATION) if one.reason == NAN else one for one in found]
        valueless_W = np.array([one.reason in VALUELESS for one in found], dtype=bool)
        # Only after the last evaluation that counts: after NaN in the middle the run went on.
        newest_W = np.flatnonzero(valueless_W & (at_W > at_N.max(initial=-math.inf)))
        newest = [found[n] for n in newest_W[np.argsort(at_W[newest_W], kind="stable")]]
        return cls.of(found, metric, _ending(newest, len(at_N) + int(valueless_W.sum()), metric))

    @classmethod
    def of_nan(
        cls, kept_R: np.ndarray, compute_R: np.ndarray, step_R: np.ndarray, metric: str = ""
    ) -> LeftOut:
        """Count the rows of a table that are not `kept_R`, whose pass rate is NaN, as `of_log` does."""
        # Of a run that diverged the compute may be NaN, too; the order of the rows stands in for it.
        at_R = compute_R if np.isfinite(compute_R).all() else np.arange(float(len(kept_R)))
        found = [Omitted(NAN, shown_step(step)) for step in step_R[~kept_R]]
        return cls.of_log(found, at_R[~kept_R], at_R[kept_R], metric)

    @classmethod
    def parse(cls, found: Any) -> LeftOut:
        """Parse the output of `to_json`, as a config.json has it; empty for anything else."""
        if not isinstance(found, Mapping):
            return cls()
        reasons, items = found.get("reasons"), found.get("evaluations")
        counts = [
            (reason, number)
            for reason, n in (reasons.items() if isinstance(reasons, Mapping) else ())
            if reason in _WHY and (number := shown_step(n) or 0) > 0
        ]
        listed = [
            Omitted(why, shown_step(one.get("step")), shown_step(one.get("line")))
            for one in (items if isinstance(items, Sequence) else ())[:MOST]
            if isinstance(one, Mapping) and isinstance(why := one.get("reason"), str) and why in _WHY
        ]
        # Anyone may have edited a config.json: nothing in it may raise, or fill a page.
        texts = [printable(str(found.get(name) or ""))[:500] for name in ("metric", "ending")]
        return cls(texts[0], tuple(counts), tuple(listed), texts[1])

    def __len__(self) -> int:
        return sum(n for _, n in self.counts)

    def joined(self, other: LeftOut) -> LeftOut:
        """Return these and the others of the same run together."""
        counts = Counter(dict(self.counts)) + Counter(dict(other.counts))
        items = tuple(_shared([*self.items, *other.items]))
        return LeftOut(self.metric or other.metric, tuple(counts.items()), items, self.ending or other.ending)

    def sentences(self) -> tuple[str, ...]:
        """Return the warnings: the ending first, then one sentence per reason, with steps or lines."""
        of = f" of '{self.metric}'" if self.metric else ""
        return tuple(
            filter(None, [self.ending, *(self._sentence(reason, n, of) for reason, n in self.counts)])
        )

    def rows(self) -> tuple[str, ...]:
        """Return the rows of a table: what is left out, one row per reason."""
        return tuple(self._sentence(reason, n, "") for reason, n in self.counts)

    def _sentence(self, reason: str, n: int, of: str) -> str:
        if reason == NO_EVALUATION:
            return (
                f"{counted(n, 'row')} left out, without an evaluation{of}: NaN in most rows stands for none"
            )
        items = [one for one in self.items if one.reason == reason]
        if reason in (BELOW, ABOVE):  # cut by the user, who needs no list
            return f"{n}{of} {_WHY[reason]}{_range(items, n)}"
        places = _places(items, n)
        return f"{counted(n, 'evaluation')}{of} left out, {_WHY[reason]}{': ' * bool(places)}{places}"

    def to_json(self) -> dict[str, Any]:
        """Return the value of "left_out" in JSON; the list is bounded, the counts are complete."""
        return {
            "total": len(self),
            "metric": self.metric or None,
            "reasons": dict(self.counts),
            "evaluations": [{"step": one.step, "line": one.line, "reason": one.reason} for one in self.items],
            "ending": self.ending or None,
        }


def _are_gaps(at_N: np.ndarray, nan_V: np.ndarray) -> bool:
    """Return whether NaN stands for rows without an evaluation, as in a table with one column per metric.

    It does if there are as many before the last evaluation as there are evaluations, and if no more follow
    the last one than lie between any two.
    """
    between = np.diff(np.searchsorted(np.sort(nan_V), [-math.inf, *np.sort(at_N), math.inf]))
    before, after = between[:-1], between[-1]
    return int(before.sum()) >= max(len(at_N), _LEAST_GAPS) and after <= before.max(initial=0)


def _ending(newest: Sequence[Omitted], total: int, metric: str) -> str:
    """Describe a run whose newest evaluations have no number; `total` counts all of its evaluations."""
    if not newest:
        return ""
    what = " or ".join(_WHY[reason] for reason in dict.fromkeys(one.reason for one in newest))
    n, of = len(newest), f" of '{metric}'" if metric else ""
    last = "the last evaluation" if n == 1 else f"the last {n} of {total} evaluations"
    share = f" ({percent(n / total)})" if n > 1 else ""
    steps = [one.step for one in newest if one.step is not None]
    more = f" (steps {steps[0]} to {steps[-1]})" if len(steps) > 1 else ""
    span = f" (step {steps[0]})" if len(steps) == 1 else more
    return (
        f"{last}{of}{share} {'is' if n == 1 else 'are'} {what}{span}: the run may have diverged "
        "there, so no ceiling is identified and verdicts are 'too early'"
    )


def _places(items: Sequence[Omitted], total: int) -> str:
    """List the steps where they are known, with lines if those are; else the lines; empty without either."""
    shown = items[:_SHOWN]
    if not shown:  # a config.json may count more than it lists
        return "not listed"
    if all(one.step is not None for one in shown):
        with_lines = all(one.line is not None for one in shown)
        names = [f"{one.step} (line {one.line})" if with_lines else f"{one.step}" for one in shown]
        word = "step"
    elif all(one.line is None for one in shown):
        return ""
    else:
        names = [f"{one.line}" if one.line is not None else "?" for one in shown]
        word = "line"
    more = f" and {total - len(shown)} more" if total > len(shown) else ""
    return f"{word}{'s' * (total != 1)} {', '.join(names)}{more}"


def _range(items: Sequence[Omitted], total: int) -> str:
    """Return the range of all steps, else of all lines: ` (steps 65 to 430)`; empty if some are unknown."""
    for word in ("step", "line"):
        places = [at for one in items if (at := getattr(one, word)) is not None]
        if len(places) == total:
            low, high = min(places), max(places)
            return f" ({word}s {low} to {high})" if low < high else f" ({word} {low})"
    return ""


def _shared(found: Sequence[Omitted]) -> list[Omitted]:
    """Keep the first of every reason, equally many of each, and at most `MOST` in all."""
    by_reason: dict[str, list[Omitted]] = {}
    for one in found:
        by_reason.setdefault(one.reason, []).append(one)
    return [one for of_reason in by_reason.values() for one in of_reason[: MOST // len(by_reason)]]


def shown_step(value: Any) -> int | None:
    """Convert a step, line or count to a whole number; None if it is not one, or beyond 2**53."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The bound first: int() raises for NaN and infinities, which are not within it.
    return int(value) if abs(value) <= 2**53 and value == int(value) else None


NONE = LeftOut()
"""The value where every evaluation counts."""
