"""The rule for hopeless trials of a sweep: the forecast of their end is below that of another trial.

    high(trial) < max low(other) + margin        low, high: ends of the interval of the mean curve at `budget`

A trial has a `high` only once its ceiling is identified (`Fit.identified`), so none is stopped before, unless
the rule is `early`. It has a `low` as soon as it can be fitted, even if it stays flat. Finished trials have
both from their fits too, as their largest measured value is the luckiest of many noisy ones.

The interval is that of the mean curve. Trials are compared with each other and the best one is kept, so
neither the noise of another evaluation nor a rerun with another seed matters. At `level` .95, the mean curve
is above its `high` with probability .025, and below its `low` with probability .025, at each look; a trial is
looked at about five to eight times.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.curve.answers import MIN_EVALUATIONS, check_level
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, InputError, number_of
from scalerl.quantiles import tails, weighted_quantiles

GROWTH = 1.25
"""A trial is fitted again when its compute has grown by this factor, as less growth tells little more."""

_LARGEST_NOISE = 0.5

Values = Mapping[Any, float]
"""The evaluations of a trial: pass rate by compute. NaN is skipped."""


@dataclass(frozen=True)
class Reach:
    """Bounds on what a trial reaches at the budget: `low` and `high`, infinite if not known."""

    low: float = -math.inf
    high: float = math.inf


UNKNOWN = Reach()


@dataclass(frozen=True)
class Rule:
    """The rule by which trials are hopeless.

    Args:
        budget: compute of a whole trial, at which trials are compared, in the unit in which they report.
        margin: in pass rate. A positive margin stops trials that would not beat the best by as much; a
            negative one stops only trials that would miss it by as much.
        level: level of the intervals; at .95 a trial's curve is, at one look, above the bound that stops it
            with probability .025. A trial is looked at, and may be stopped, about five to eight times.
        noise_sd: sampling noise of one evaluation, if known; the fitted noise is at least this.
        early: also stop trials whose ceiling is not identified. Their intervals are wide, but a trial below
            the best by more than that is hopeless too.

    Raises:
        InputError: an argument is out of its range.
    """

    budget: float
    margin: float = 0.0
    level: float = 0.95
    noise_sd: float | None = None
    early: bool = False

    def __post_init__(self) -> None:
        budget = number_of(self.budget, "the budget")
        if not (math.isfinite(budget) and budget > 0):
            raise InputError(f"the budget must be the compute of a whole trial, above 0, found {budget:g}")
        if not -1 < number_of(self.margin, "the margin") < 1:
            raise InputError(f"the margin must be a difference in (-1, 1), e.g. 0.01, found {self.margin:g}")
        check_level(self.level)
        if self.noise_sd is not None and not 0 <= number_of(self.noise_sd, "the noise") <= _LARGEST_NOISE:
            raise InputError(
                f"the noise is a standard deviation of pass rates in [0, {_LARGEST_NOISE:g}]; "
                f"found {self.noise_sd:g}"
            )

    def points(self, values: Values, source: str = "trial") -> Points:
        """Return the evaluations of a trial as points, in order of compute.

        Raises:
            InputError: a compute or a pass rate is out of its range; the message names `source`.
        """
        compute_N, pass_rate_N = np.array(sorted(values.items()), dtype=float).reshape(-1, 2).T
        return Points.from_arrays(compute_N, pass_rate_N, noise_sd=self.noise_sd, source=source)

    def reach(self, points: Points) -> Reach:
        """Fit a trial, and return what it reaches."""
        if len(points) < MIN_EVALUATIONS:
            return UNKNOWN
        try:
            return self.reach_of(fit(points))
        except CannotAnswerError:
            return UNKNOWN

    def reach_of(self, result: Fit) -> Reach:
        """Return what a trial with this fit reaches; `UNKNOWN` if no curve describes it."""
        if result.misfit or result.ending:
            return UNKNOWN
        post = result.posterior
        low, high = weighted_quantiles(post.curve_at(self.budget), post.weight, tails(self.level)).tolist()
        return Reach(low, high if result.identified or self.early else math.inf)

    def looked_at(self, values: Values) -> dict[float, float]:
        """Return the evaluations by compute, up to the last one at which a fit is due."""
        compute = sorted(c for c, value in values.items() if not math.isnan(value))
        last = len(compute)
        while last > 1 and self._look(compute[last - 2]) == self._look(compute[last - 1]):
            last -= 1
        return {c: values[c] for c in compute[:last]}

    def _look(self, compute: float) -> int:
        """Return the number of the look to which this compute belongs, counted from that at the budget."""
        if not 0 < compute < math.inf:
            return -(10**6)
        return math.floor(math.log(compute / self.budget) / math.log(GROWTH) + 1e-9)


class Sweep:
    """The trials of a sweep under a rule; fits are made only if needed, and kept while nothing is new."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._known: dict[Hashable, tuple[dict[float, float], Reach]] = {}

    def reach(self, trial: Hashable, values: Values) -> Reach:
        """Return `Rule.reach` of the evaluations up to the last at which a fit is due."""
        seen = self.rule.looked_at(values)
        known = self._known.get(trial)
        if known is None or known[0] != seen:
            new = self.rule.reach(self.rule.points(seen, f"trial {trial}"))
            known = self._known[trial] = seen, new
        return known[1]

    def hopeless(self, trial: Hashable, values: Values, others: Mapping[Any, Values]) -> str | None:
        """Return one sentence why the trial is hopeless, or None if it is not.

        `others` are the trials with which it competes: running and finished ones, but not failed or stopped
        ones, which can no longer be chosen. The leading trial is never hopeless.

        Raises:
            InputError: a compute or a pass rate is out of its range; the message names the trial.
        """
        rule, seen = self.rule, self.rule.looked_at(values)
        self.rule.points(seen, f"trial {trial}")
        if len(seen) < MIN_EVALUATIONS or max(seen) >= rule.budget:
            return None
        lows = {name: self.reach(name, of).low for name, of in others.items() if name != trial}
        best = max(lows, key=lambda name: lows[name], default=None)
        bar = -math.inf if best is None else lows[best]
        if seen[max(seen)] >= bar + rule.margin:
            return None  # no fit is needed: it is already there, and curves do not fall
        own = self.reach(trial, values)
        if own.high >= bar + rule.margin or own.low >= bar:
            return None
        margin = f" (margin {rule.margin:+g})" if rule.margin else ""
        least = f"trial {best} at least {bar:.3f}{margin}"
        return f"at {rule.budget:g} it reaches at most {own.high:.3f}, and {least}"
