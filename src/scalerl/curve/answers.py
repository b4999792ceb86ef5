"""The parts of a fit's answer: noise, forecasts, the chance to reach a target and its verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from scalerl._views import view
from scalerl.curve.quantiles import Interval
from scalerl.errors import InputError, number_of

GO, NO_GO = 0.95, 0.05
"""Probability of reaching the target from which the verdict is go, and to which it is no-go."""

Verdict = Literal["go", "no-go", "too close", "too early"]


@dataclass(frozen=True)
class NoiseEstimate:
    """Posterior means of the noise of one evaluation, and what is known beside the run.

    `phi` is the correlation of neighbours, `floor` the sampling noise on fixed prompts, NaN where not known,
    and `seed_sd` the sd of A from seed to seed that the intervals of a rerun assume (`scalerl.curve.seeds`).
    """

    sd: float
    phi: float
    floor: float
    seed_sd: float


@dataclass(frozen=True)
class Forecast:
    """What an evaluation at `compute` should show.

    `mean` is the posterior mean of the mean curve, `paper_point` the least-squares log-logistic curve,
    `interval` holds the mean curve of this run, `prediction` one more evaluation of it with its noise, and
    `rerun` the mean curve of another run of the recipe, with another seed.
    """

    compute: float
    mean: float
    paper_point: float
    interval: Interval
    prediction: Interval
    rerun: Interval
    axis: str = "compute"
    """Of `compute`."""

    def __str__(self) -> str:
        parts = {"curve": self.interval, "evaluation": self.prediction, "rerun": self.rerun}
        spans = "  ".join(f"{name} {span(ends, '.3f')}" for name, ends in parts.items())
        return f"at {self.compute:g}: {self.mean:.3f}  {spans}  paper {self.paper_point:.3f}"

    def to_json(self) -> dict[str, Any]:
        """The entry of `forecast` in the JSON output."""
        return {
            "compute": self.compute,
            "mean": self.mean,
            "paper_point": self.paper_point,
            "interval": list(self.interval),
            "prediction": list(self.prediction),
            "rerun": list(self.rerun),
        }

    def _repr_html_(self) -> str:
        return view("forecast_html", self)


@dataclass(frozen=True)
class Chance:
    """Whether a target is reached at a budget, by this run and by a rerun with another seed."""

    probability: float
    probability_rerun: float
    verdict: Verdict
    verdict_rerun: Verdict
    why: str
    """One sentence: why the verdict for this run is what it is."""

    @property
    def answer(self) -> str:
        """The verdict in capitals, with the probability where there is one to act on."""
        return _answer(self.verdict, self.probability)

    @property
    def answer_rerun(self) -> str:
        """The same for a rerun."""
        return _answer(self.verdict_rerun, self.probability_rerun)


def _answer(verdict: Verdict, probability: float) -> str:
    return verdict.upper() + ("" if verdict == "too early" else f", probability {probability:.2f}")


def span(interval: tuple[float | None, float | None], spec: str = ".3f") -> str:
    """An interval as `[low, high]`; an end that is None is open."""
    low, high = ("open" if end is None else f"{end:{spec}}" for end in interval)
    return f"[{low}, {high}]"


def check_level(level: float) -> None:
    """Raise an InputError unless `level` is between 0 and 1."""
    if not 0 < number_of(level, "the level of the intervals") < 1:
        raise InputError(f"the level of the intervals is between 0 and 1, found {level:g}")


def check_compute(compute: float, what: str) -> None:
    """Raise an InputError unless `compute` is a finite number of 0 or more; `what` names it."""
    if not (math.isfinite(number_of(compute, what)) and compute >= 0):
        raise InputError(f"{what} is a number of 0 or more, found {compute:g}")


def check_target(target: float, budget: float) -> None:
    """Raise an InputError unless `target` is a pass rate, and `budget` an amount of compute."""
    if not 0 <= number_of(target, "the target") <= 1:
        raise InputError(f"the target is a pass rate in [0, 1], found {target:g}")
    check_compute(budget, "the budget")
