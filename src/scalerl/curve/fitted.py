"""Answers from a fitted curve: its ceiling, forecasts at other computes, probabilities, the verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, overload

import numpy as np

from scalerl.curve.answers import (
    BENT,
    FAR,
    GO,
    NO_GO,
    Chance,
    Forecast,
    Forecasts,
    Identification,
    Intervals,
    Medians,
    NoiseEstimate,
    Verdict,
    check_compute,
    check_target,
)
from scalerl.curve.families import Curve
from scalerl.curve.misfit import Misfit
from scalerl.curve.points import Points
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.sample import MIN_TO_JUDGE, Sample
from scalerl.curve.seeds import SEED_PRIOR, rerun
from scalerl.curve.worth import expected_width, gain_per_unit, identified_at, outlook, stop_at
from scalerl.errors import InputError, counted, number_of
from scalerl.numbers import amount_text, chance_text
from scalerl.quantiles import Interval, noisy_quantiles, tails, weighted_quantiles
from scalerl.record.amounts import parse_amount
from scalerl.record.left_out import ABOVE, AT_START, BELOW, FAILED, LeftOut
from scalerl.record.metric import Metric

_DRAWS = 2000


@dataclass(frozen=True, eq=False)
class FittedCurve:
    """What the data say about a curve: the fields and the arithmetic of `scalerl.Fit`."""

    axis: str
    min_compute: float
    max_compute: float
    r0_value: float
    r0_source: Literal["given", "measured", "fitted"]
    paper_curve: Curve
    """The least-squares log-logistic curve (the paper's), a function of compute. The intervals are not about
    it, and `forecast` follows the posterior median instead."""
    rmse: float
    """Root mean square of the residuals of `paper_curve`."""
    median: Medians
    intervals: Intervals
    families: dict[str, float]
    """Posterior weight of every family."""
    noise: NoiseEstimate
    identification: Identification
    fallen: str
    """A message if the run has fallen far below its maximum and stayed there; else empty."""
    newest_failed: str
    """A message if the newest evaluation is left out, as it may have failed; else empty."""
    misfit: Misfit | None
    """Why no family describes the run, which withholds its ceiling; None if one does."""
    suspected: Misfit | None
    """A change of slope about as likely as none, which leaves the ceiling not identified; else None."""
    basins: tuple[tuple[Curve, float], ...]
    """Minima of the log-logistic least squares nearly as likely as the best (first), with their RSS."""
    warnings: tuple[str, ...]
    points: Points = field(repr=False)
    """The points that were fitted, by compute."""
    excluded: Points = field(repr=False)
    """The points that were not fitted: beyond the cuts, at compute 0 if `r0` was set, or failed."""
    sample: Sample = field(repr=False)
    """`points` as the numerics use them: sorted, replicates pooled."""
    posterior: Posterior = field(repr=False)
    prior: str = "default"
    """"default" or "flat" (see `scalerl.curve.prior`), or "campaign (n siblings)"."""

    @property
    def n_points(self) -> int:
        """How many points were fitted."""
        return len(self.points)

    @property
    def left_out(self) -> LeftOut:
        """The evaluations that were not fitted: left out by the reader, beyond the cuts, or failed."""
        found, cut, at_N = self.points.left_out, self.excluded, self.excluded.compute_N
        cases = [at_N == 0, at_N < self.min_compute, at_N > self.max_compute]  # the first that holds decides
        why_N = np.select(cases, [AT_START, BELOW, ABOVE], FAILED)
        for reason in (AT_START, BELOW, ABOVE, FAILED):
            found = found.joined(cut.select(why_N == reason).omitted(reason))
        return replace(found, ending=found.ending or self.newest_failed)

    @property
    def ceiling(self) -> float | None:
        """Posterior median of A over all families, the point beside `intervals.A`; None where withheld."""
        return None if self.misfit else self.median.A

    @property
    def identified(self) -> bool:
        """Whether the data fix the ceiling."""
        return self.misfit is None and not self.reservation and self.identification.identified

    @property
    def why(self) -> str:
        """One sentence that says why the ceiling is identified, or why it is not."""
        if self.reservation:
            return self.reservation
        if self.misfit:
            return self.misfit.why
        return "; ".join(filter(None, [self.fallen, self.identification.why]))

    @property
    def ending(self) -> str:
        """A message if the newest evaluations have no number or may have failed; else empty."""
        return self.points.left_out.ending or self.newest_failed

    @property
    def metric(self) -> Metric:
        """What was fitted: the metric's name and kind, and the prompts that it averages."""
        return self.points.metric

    @property
    def reservation(self) -> str:
        """Why no ceiling is identified, whatever the curve: a training reward, or `ending`; else empty."""
        return self.metric.no_verdict or self.ending

    @property
    def too_few(self) -> str:
        """A message if there are too few evaluations for a verdict or a comparison; else empty."""
        n = len(np.unique(self.points.compute_N))
        return f"{counted(n, 'evaluation')}; a verdict needs at least {MIN_TO_JUDGE}" * (n < MIN_TO_JUDGE)

    @property
    def lack_of_fit(self) -> str | None:
        """The kind of `misfit`: peaked, jump, regime or residuals; None without one."""
        return self.misfit.kind if self.misfit else None

    @property
    def c_max_over_c_mid(self) -> float:
        """How many times C_mid the data reach: posterior median over all families."""
        return self.identification.ratio

    @overload
    def forecast(self, compute: float | str) -> Forecast: ...
    @overload
    def forecast(self, compute: Sequence[float | str] | np.ndarray) -> Forecasts: ...
    def forecast(self, compute: float | str | Sequence[float | str] | np.ndarray) -> Forecast | Forecasts:
        """Forecast at `compute`, in the unit of the axis; several computes give arrays.

        A string is an amount as `scalerl fit --at` takes it: `"2x"` (twice the data), `"300 GFLOP"`, `"12k"`.

        The point is the posterior median of the mean curve over all families. `paper_curve`, the
        least-squares curve of one family, gives another number.

        Raises:
            InputError: a compute is negative or not finite, or a string is not an amount on the axis.
        """
        if np.ndim(compute):  # not by its type: a column of a data frame is not a sequence
            return Forecasts.of([self._forecast_at(one) for one in list(compute)], self.axis)  # pyright: ignore[reportArgumentType]
        return self._forecast_at(compute)  # pyright: ignore[reportArgumentType]

    def _forecast_at(self, compute: float | str) -> Forecast:
        if isinstance(compute, str):
            reach = max(float(one.compute_N.max(initial=0.0)) for one in (self.points, self.excluded))
            asked = parse_amount(compute, what="a compute to forecast at: ")
            compute = asked.on("forecast", self.axis, reach, ())
        at_Q = tails(self.intervals.level)
        median, (least, most) = self.predicted(compute, at_Q)
        prediction, value = (float(least), float(most)), self.posterior.curve_at(compute)
        low, high = weighted_quantiles(value, self.posterior.weight, at_Q).tolist()
        low = min(low, self._may_have_fallen_to)
        # A seed effect moves a whole curve, so a rerun is drawn, whereas the run itself is integrated.
        rerun_low, rerun_high = np.quantile(self._rerun_at(compute), at_Q).tolist()
        paper, rerun = float(self.paper_curve(compute)), (rerun_low, rerun_high)
        return Forecast(float(compute), median, paper, (low, high), prediction, rerun, self.axis)

    def predicted(self, compute: float, at_Q: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the median of the mean curve at `compute`, and quantiles (Q,) of one evaluation there.

        They equal `median` and, at the tails of the level, `prediction` of `forecast`, at less cost.

        Raises:
            InputError: `compute` is negative or not finite.
        """
        check_compute(compute, "a compute to forecast at")
        post, value = self.posterior, self.posterior.curve_at(compute)
        # Normal noise reaches beyond [0, 1], where no evaluation can be.
        noisy_Q = np.clip(noisy_quantiles(value, post.weight, post.sd_J, post.sd_weight_J, at_Q), 0.0, 1.0)
        noisy_Q[at_Q < 0.5] = np.minimum(noisy_Q[at_Q < 0.5], self._may_have_fallen_to)
        return float(weighted_quantiles(value, post.weight, np.array([0.5]))[0]), noisy_Q

    @property
    def _may_have_fallen_to(self) -> float:
        """The newest pass rate if it is left out, as about half of such runs stay there; else infinite."""
        within_N = self.excluded.compute_N <= self.max_compute
        return float(self.excluded.pass_rate_N[within_N][-1]) if self.newest_failed else math.inf

    @functools.cached_property
    def _rerun(self) -> Draws:
        return rerun(self.posterior.draws(_DRAWS), SEED_PRIOR)

    def _rerun_at(self, compute: float) -> np.ndarray:
        """Return equally probable values of the mean curve at `compute` in a rerun with another seed."""
        return self._rerun.curves_at(np.array([compute]))[:, 0]

    def band(self, compute_M: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return median and interval of the mean curve at every compute, three arrays (M,), for plots.

        Raises:
            InputError: a compute is negative or not finite.
        """
        compute_M = np.atleast_1d(compute_M)
        for compute in compute_M:
            check_compute(compute, "the compute")
        # The last .1 % of the weight is in many cells, all of which would be evaluated at every compute.
        post = self.posterior.heaviest(0.999)
        at_Q = np.array([0.5, *tails(self.intervals.level)])
        rows = [weighted_quantiles(value, post.weight, at_Q) for value in post.curves_at(compute_M)]
        median_M, low_M, high_M = np.array(rows).reshape(-1, 3).T
        return median_M, low_M, high_M

    def probability(self, target: float, budget: float) -> float:
        """Return the probability that the mean curve at compute `budget` is at least `target`.

        Raises:
            InputError: `target` is not a share in [0, 1], or `budget` is negative.
        """
        check_target(target, budget)
        post = self.posterior
        # Weights sum to 1 only up to rounding, and 1 + 1e-16 is not a probability.
        return float(min(1.0, np.sum(post.weight[post.curve_at(budget) >= target])))

    def probability_rerun(self, target: float, budget: float) -> float:
        """Return the same probability for a rerun of the recipe with another seed."""
        check_target(target, budget)
        return float(np.mean(self._rerun_at(budget) >= target))

    def compute_to(self, target: float) -> Interval:
        """Return the interval of the compute at which the mean curve reaches `target`; inf if never.

        Raises:
            InputError: `target` is not a share in [0, 1].
        """
        check_target(target, 0.0)
        post, at_Q = self.posterior, tails(self.intervals.level)
        value, weight = post.compute_to(float(target)).ravel(), post.weight.ravel()
        order = np.argsort(value, kind="stable")
        held = np.cumsum(weight[order])
        # No interpolation: a neighbour may be infinite.
        place_Q = np.minimum(np.searchsorted(held, at_Q * held[-1]), len(order) - 1)
        low, high = value[order[place_Q]].tolist()
        return low, high

    def verdict(self, target: float, budget: float, rerun: bool = False) -> Verdict:
        """Decide whether `target` is reached at `budget`, by this run or by a rerun with another seed.

        "training reward" if that was fitted. Otherwise "go" from P = .95 and "no-go" up to P = .05, whether
        or not the ceiling is identified: a forecast at the budget may be narrow where the ceiling is not.
        Between them "too close" if the ceiling is identified, else "too early". A "no-go" is also "too early"
        if the data do not reach `BENT` times C_mid and the run would reach the target by rising as it has:
        nothing shows yet that it bends. So is any verdict if no family describes the run, if it has fewer
        than six evaluations, if the newest have no number or may have failed, or if the budget is beyond
        `FAR` times the compute and the ceiling is not identified.
        """
        chance = self.chance(target, budget)
        return chance.verdict_rerun if rerun else chance.verdict

    def reasons(self, target: float, budget: float) -> str:
        """Return one sentence that explains the verdict."""
        return self.chance(target, budget).why

    def chance(self, target: float, budget: float) -> Chance:
        """Return probabilities, verdicts and their reason, each computed once.

        Raises:
            InputError: as `probability`.
        """
        here, again = self.probability(target, budget), self.probability_rerun(target, budget)
        doubt = self.doubt(budget)
        goes_on = self._goes_on_to(target, budget)
        verdict, verdict_rerun = self._verdict(here, doubt, goes_on), self._verdict(again, doubt, goes_on)
        at = amount_text(self.axis, budget)
        why = f"{target:g} is reached at {at} with probability {chance_text(here)}"
        if doubt:
            why = doubt
        elif self.identified:
            why = f"the ceiling is identified; {why}"
        elif goes_on and here <= NO_GO:
            why = f"{why}, but nothing bends yet, and as it has risen so far the run reaches it"
        elif verdict == "too early" and (self.compute_to_identify or math.inf) > budget:
            why = (
                f"the ceiling will probably not be known within the budget of {at}; the "
                f"pass rate reaches {target:g} there with probability {chance_text(here)}"
            )
        elif verdict == "too early":
            why = f"{why}, and the ceiling is not identified: {self.why}"
        else:
            why = f"{why}, though the ceiling is not identified"
        return Chance(here, again, verdict, verdict_rerun, why, bool(self.reservation or self.misfit))

    def doubt(self, budget: float) -> str:
        """Return why a budget gets neither go nor no-go, whatever its probability; else empty."""
        # Newest evaluations without a number outrank what the older ones say.
        if doubt := self.reservation or self.too_few:
            return doubt
        if self.misfit:
            return self.misfit.why
        now = float(self.points.compute_N[-1])
        if not self.identified and budget > FAR * now * (1 + 1e-9):
            far = f"{amount_text(self.axis, budget)} is beyond {FAR:g} times the compute so far"
            return f"{far}, and the ceiling is not identified: {self.why}"
        return ""

    def _goes_on_to(self, target: float, budget: float) -> bool:
        """Return whether the run has not bent, and the line of its later half reaches `target` by `budget`.

        If that line is steeper than the one through the first half, its slope keeps growing by that factor
        (at most 2) every half run, for one and a half times the run.
        """
        if self.identification.ratio >= BENT:
            return False
        now, n = float(self.points.compute_N[-1]), len(self.points)
        run_N, rate_N = self.points.compute_N / now, self.points.pass_rate_N
        early, _ = _line(run_N[: n - n // 2], rate_N[: n - n // 2])
        late, end = _line(run_N[n // 2 :], rate_N[n // 2 :])
        growth = min(max(late / max(early, 1e-300), 1.0), 2.0) if late > 0 else 1.0
        ahead = min(budget, FAR * now) / now - 1  # beyond that there is no verdict
        halves_M = np.linspace(0.0, max(2 * ahead, 0.0), 64)
        steeper = float(np.mean(growth ** np.minimum(halves_M, 3.0)))
        return end + late * ahead * steeper >= target

    def _verdict(self, probability: float, doubt: str, goes_on: bool) -> Verdict:
        if self.metric.no_verdict:
            return "training reward"
        if doubt:
            return "too early"
        if probability >= GO:
            return "go"
        if probability <= NO_GO and not goes_on:
            return "no-go"
        return "too close" if self.identified else "too early"

    def gain_per_unit(self, compute: float) -> float:
        """Return the expected gain in pass rate per further unit of compute (per dollar on that axis)."""
        check_compute(compute, "a compute")
        return float(gain_per_unit(self.posterior, np.array([compute]))[0]) if compute > 0 else 0.0

    def stop_at(self, worth: float) -> float:
        """Return the compute from which a further unit is expected to gain less than `worth`, or inf.

        Raises:
            InputError: `worth` is not above 0.
        """
        if not (math.isfinite(number_of(worth, "the worth of a unit of compute")) and worth > 0):
            raise InputError(
                f"the worth of a unit of compute must be a gain in pass rate above 0, found {worth:g}"
            )
        return stop_at(self.posterior, float(self.points.compute_N[-1]), worth)

    def expected_width(self, compute_M: np.ndarray, level: float | None = None) -> np.ndarray:
        """Return the expected width of A's interval if the run goes on to each compute, evaluated as so far.

        `level` defaults to that of the fit.
        """
        noise, level = self.noise, self.intervals.level if level is None else level
        return expected_width(self.posterior, self.sample, noise.sd, noise.phi, compute_M, level)

    @functools.cached_property
    def compute_to_identify(self) -> float | None:
        """The compute at which the ceiling is expected to be identified, by A's interval and that of C_mid.

        None if that is not within 8 times the compute so far, or if something else is wrong, such as a
        wander. The compute so far if the ceiling is identified already.
        """
        if self.identified:
            return float(self.points.compute_N[-1])
        if self.reservation:
            return None
        known = self.posterior, self.sample, self.noise.sd, self.noise.phi
        return identified_at(functools.partial(outlook, *known), self.identification, self.sample)


def _line(run_N: np.ndarray, rate_N: np.ndarray) -> tuple[float, float]:
    """Return the slope of the least-squares line, and its value at the run's present compute (1)."""
    offset_N = run_N - run_N.mean()
    square = float(offset_N @ offset_N)
    slope = float(offset_N @ rate_N) / square if square > 0 else 0.0
    return slope, float(rate_N.mean() + slope * (1 - run_N.mean()))
