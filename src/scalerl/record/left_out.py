"""Evaluations that were read and do not count: how many, which, and why."""

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
"""NaN in a row that holds none."""
VALUELESS = (NAN, INFINITE, NOT_A_NUMBER)
"""Reasons by which an evaluation has no pass rate at all."""
MOST = 100
"""Evaluations that are listed one by one; all are counted."""
_SHOWN = 12
"""Most evaluations that a sentence names."""
_LEAST_GAPS = 3
"""Values of NaN before the last evaluation from which on they may stand for rows without one."""
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
    """One evaluation that does not count; what is not known of its place is None."""

    reason: str
    step: int | None = None
    line: int | None = None
    """Line, row or record of its file."""


@dataclass(frozen=True)
class LeftOut:
    """The evaluations of one run that do not count."""

    metric: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    """How many, by reason."""
    items: tuple[Omitted, ...] = ()
    """The first of every reason, `MOST` in all."""
    ending: str = ""
    """A sentence where the newest evaluations are no numbers: the run may have diverged."""

    @classmethod
    def of(cls, omitted: Iterable[Omitted], metric: str = "", ending: str = "") -> LeftOut:
        """Count all of them, in the order of their steps."""
        found = list(omitted)
        counts = Counter(one.reason for one in found)
        return cls(metric, tuple(counts.items()), tuple(_shared(found)), ending)

    @classmethod
    def of_log(
        cls, omitted: Sequence[Omitted], at_W: np.ndarray, at_N: np.ndarray, metric: str = ""
    ) -> LeftOut:
        """Count all of a log, tell apart NaN that stands for no evaluation, and add the ending.

        Args:
            omitted: in the order in which they are listed.
            at_W: their place along the run (step or compute); NaN where it is not known.
            at_N: that of the evaluations that count.
            metric: the name of the pass rate.
        """
        found = list(omitted)
        nan_W = np.array([one.reason == NAN for one in found], dtype=bool)
        if _are_gaps(at_N, at_W[nan_W]):
            # A table pads rows without an evaluation by NaN; without this such a run would seem to diverge.
            found = [replace(one, reason=NO_EVALUATION) if one.reason == NAN else one for one in found]
        valueless_W = np.array([one.reason in VALUELESS for one in found], dtype=bool)
        # Only after the last evaluation that counts: NaN in the middle was passed, and the run went on.
        newest_W = np.flatnonzero(valueless_W & (at_W > at_N.max(initial=-math.inf)))
        newest = [found[n] for n in newest_W[np.argsort(at_W[newest_W], kind="stable")]]
        return cls.of(found, metric, _ending(newest, len(at_N) + int(valueless_W.sum()), metric))

    @classmethod
    def parse(cls, found: Any) -> LeftOut:
        """Parse what `to_json` gave, as a config.json has it; empty for anything else."""
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
        # A config.json that anyone may have edited: nothing in it may raise, or fill a page.
        texts = [printable(str(found.get(name) or ""))[:500] for name in ("metric", "ending")]
        return cls(texts[0], tuple(counts), tuple(listed), texts[1])

    def __len__(self) -> int:
        return sum(n for _, n in self.counts)

    def joined(self, other: LeftOut) -> LeftOut:
        """Return these and others of the same run."""
        counts = Counter(dict(self.counts)) + Counter(dict(other.counts))
        items = tuple(_shared([*self.items, *other.items]))
        return LeftOut(self.metric or other.metric, tuple(counts.items()), items, self.ending or other.ending)

    def sentences(self) -> tuple[str, ...]:
        """Return the warnings: the ending first, then a sentence for every reason, with steps or lines."""
        of = f" of '{self.metric}'" if self.metric else ""
        return tuple(
            filter(None, [self.ending, *(self._sentence(reason, n, of) for reason, n in self.counts)])
        )

    def rows(self) -> tuple[str, ...]:
        """Return the rows of a table: what is left out for every reason."""
        return tuple(self._sentence(reason, n, "") for reason, n in self.counts)

    def _sentence(self, reason: str, n: int, of: str) -> str:
        if reason == NO_EVALUATION:
            return (
                f"{counted(n, 'row')} left out, without an evaluation{of}: NaN in most rows stands for none"
            )
        items = [one for one in self.items if one.reason == reason]
        if reason in (BELOW, ABOVE):  # cut by the reader, who needs no list
            return f"{n}{of} {_WHY[reason]}{_range(items, n)}"
        places = _places(items, n)
        return f"{counted(n, 'evaluation')}{of} left out, {_WHY[reason]}{': ' * bool(places)}{places}"

    def to_json(self) -> dict[str, Any]:
        """Return the value of "left_out" in JSON; the list is bounded, the counts are of all."""
        return {
            "total": len(self),
            "metric": self.metric or None,
            "reasons": dict(self.counts),
            "evaluations": [{"step": one.step, "line": one.line, "reason": one.reason} for one in self.items],
            "ending": self.ending or None,
        }


def _are_gaps(at_N: np.ndarray, nan_V: np.ndarray) -> bool:
    """Whether NaN stands for a row without an evaluation, as where a table has a column for every metric.

    It does if there are as many before the last evaluation as there are evaluations, and no more follow on
    that one than there are between any two.
    """
    between = np.diff(np.searchsorted(np.sort(nan_V), [-math.inf, *np.sort(at_N), math.inf]))
    before, after = between[:-1], between[-1]
    return int(before.sum()) >= max(len(at_N), _LEAST_GAPS) and after <= before.max(initial=0)


def _ending(newest: Sequence[Omitted], total: int, metric: str) -> str:
    """Describe a run whose newest evaluations have no number; `total` are all that it made."""
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
    """List steps where they are known, with lines where those are; else lines; empty without either."""
    shown = items[:_SHOWN]
    if not shown:  # of a config.json that counts more than it lists
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
    """Return the steps, else the lines, of all: ` (steps 65 to 430)`; empty where not all are known."""
    for word in ("step", "line"):
        places = [at for one in items if (at := getattr(one, word)) is not None]
        if len(places) == total:
            low, high = min(places), max(places)
            return f" ({word}s {low} to {high})" if low < high else f" ({word} {low})"
    return ""


def _shared(found: Sequence[Omitted]) -> list[Omitted]:
    """Keep the first of every reason, as many of each, `MOST` in all at the most."""
    by_reason: dict[str, list[Omitted]] = {}
    for one in found:
        by_reason.setdefault(one.reason, []).append(one)
    return [one for of_reason in by_reason.values() for one in of_reason[: MOST // len(by_reason)]]


def shown_step(value: Any) -> int | None:
    """Convert a step, line or count to a whole number; None if it is none, or beyond 2**53."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The bound first: int() raises for NaN and infinities, which are not within it.
    return int(value) if abs(value) <= 2**53 and value == int(value) else None


NONE = LeftOut()
"""The value where every evaluation counts."""
