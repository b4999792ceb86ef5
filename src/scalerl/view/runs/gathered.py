"""Runs that are shown together: their options, their comparison, and the assumptions."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scalerl.curve.families import FAMILIES
from scalerl.curve.points import Points
from scalerl.errors import InputError, listed
from scalerl.forecast.comparison import Comparison
from scalerl.numbers import Unit, as_mapping, percent, plain, rate, unit_for
from scalerl.record.devices import is_of_one_device
from scalerl.record.downstream import last_of_each
from scalerl.record.metric import Metric
from scalerl.record.prompts import of_task
from scalerl.view.facts.facts import imported
from scalerl.view.facts.fit_rows import beyond, common_budget
from scalerl.view.facts.shown import RunGroup, ShownRun
from scalerl.view.runs.groups import grouped, recipe_groups, with_draws

_AXES = {
    "gpu_hours": "hours of all devices while they generate, train and idle; evaluating is left out",
    "flops": "floating-point operations of generating and training",
    "tokens": "tokens that were generated, each counted once",
    "tokens_processed": "tokens that were generated, and tokens that were trained on, added up",
    "samples": "completions that the trainer consumed",
    "steps": "trainer steps",
    "dollars": "GPU-hours at a price",
}


@dataclass(frozen=True)
class RunsView:
    """Runs on one compute axis, each with a fit or the reason for none, and their recipes' comparison."""

    runs: tuple[ShownRun, ...]
    level: float = 0.95
    budget: float | None = None
    """Compute to forecast at, in the unit of the axis."""
    target: float | None = None
    """Pass rate to reach at the budget."""
    r0: float | Literal["free"] | None = None
    min_compute: float = 0.0
    max_compute: float = math.inf
    recipes: Mapping[str, Sequence[ShownRun]] = field(default_factory=dict)
    """The runs of every compared recipe, together all runs; empty if nothing is compared."""
    comparison: Comparison | None = None
    not_compared: str = ""
    """Why nothing is compared, in a sentence."""
    price: float | None = None
    """Dollars per GPU-hour, for the axis `dollars`."""
    left_out: tuple[str, ...] = ()
    """Sentences on runs that cannot be read."""

    @property
    def axis(self) -> str:
        """The compute axis of all fits."""
        return self.runs[0].points.axis

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics behind the pass rates: one, or several that the user named."""
        return tuple(dict.fromkeys(replace(run.points.metric, others=()) for run in self.runs))

    @property
    def unit(self) -> Unit:
        """The unit of compute in tables."""
        of_one = any(is_of_one_device(run.record, self.axis) for run in self.runs)
        return unit_for(self.axis, max(self.spent, self.end), of_one)

    @property
    def spent(self) -> float:
        """The largest compute of a run so far, up to `max_compute`."""
        return max(float(run.used.compute_N.max(initial=0.0)) for run in self.runs)

    @property
    def end(self) -> float:
        """Compute of the forecast: the budget, the common budget of all runs, or twice the compute so far."""
        return self._end[0]

    @property
    def where(self) -> str:
        """The meaning of `end` as text."""
        return self._end[1]

    @functools.cached_property
    def _end(self) -> tuple[float, str]:
        if self.budget is not None:
            return self.budget, "the budget"
        if (budget := common_budget((run.record, self.axis) for run in self.runs)) > 0:
            return budget, "the end of the run" if len(self.runs) == 1 else "the end of the runs"
        return 2 * self.spent, "twice the compute so far"

    @property
    def beyond(self) -> list[str]:
        """A warning if the budget lies far beyond the compute of all runs, else nothing."""
        amounts = [self.min_compute, *([] if self.budget is None else [self.budget])]
        found = beyond(amounts, [(run.points, run.record) for run in self.runs])
        return [found] if found else []

    @property
    def uncompared(self) -> list[str]:
        """Sentences on the runs with a curve that the comparison leaves out."""
        short = [run for run in self.runs if self.comparison and run.fit and run.not_compared]
        return [f"left out of the comparison: {run.name}: {run.not_compared}" for run in short]

    @functools.cached_property
    def recipe_groups(self) -> list[RunGroup]:
        """The runs grouped by recipe, as in the comparison."""
        return with_draws(self.recipes) if self.recipes else recipe_groups(self.runs)

    @functools.cached_property
    def parts(self) -> dict[str, ShownRun]:
        """Tasks and suites of a single run, by name, each with its own curve."""
        run, record = self.runs[0], self.runs[0].record
        if len(self.runs) > 1 or record is None or record.task:
            return {}
        names = [*record.tasks, *last_of_each(record.downstream())]
        options = {name: getattr(self, name) for name in ("level", "r0", "min_compute", "max_compute")}
        return parts_of(run, names, self.price, **options)

    @property
    def tasks(self) -> list[ShownRun]:
        """The parts that are tasks, which are drawn beside the run."""
        return [run for run in self.parts.values() if run.record and run.record.task in run.record.tasks]

    @property
    def title(self) -> str:
        """The names of a few runs, or how many there are."""
        names = [run.name for run in self.runs]
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"


def compared(
    view: RunsView,
    recipes: Mapping[str, Sequence[ShownRun]],
    base: str | None = None,
    budget: float | None = None,
) -> RunsView:
    """Return the view with its recipes compared with `base`, by default the first, or with why none is.

    Raises:
        InputError: there is no recipe `base`, or the fits cannot be compared.
    """
    from scalerl.forecast import compare
    from scalerl.forecast.recipes import seed_prior, seeds_if_known

    if base is not None and base not in recipes:
        raise InputError(f"no recipe '{base}' to compare with; recipes: {', '.join(recipes)}")
    view = replace(view, recipes=recipes)
    able = {name: [run for run in members if not run.not_compared] for name, members in recipes.items()}
    fits = {name: [run.fit for run in members if run.fit] for name, members in able.items() if members}
    if len(fits) < 2 or (base is not None and base not in fits):
        return replace(view, not_compared=f"Nothing is compared: {_lacking(recipes, able)}.")
    target = view.target if view.target is not None and 0 < view.target < 1 else None
    prior = seed_prior(run.record for members in recipes.values() for run in members)
    shown = {name: [(run.name, run.record) for run in able[name]] for name in fits}
    found = compare(
        fits,
        base=base,
        budget=budget,
        target=target,
        level=view.level,
        seed_prior=prior,
        seeds=seeds_if_known(shown),
    )
    return replace(view, comparison=found)


def _lacking(recipes: Mapping[str, Sequence[ShownRun]], able: Mapping[str, Sequence[ShownRun]]) -> str:
    """Return why recipes are not compared: there is one alone, or others have no fit."""
    if len(recipes) == 1:
        return f"all runs are of one recipe, {next(iter(recipes))}"
    first = {name: members[0] for name, members in recipes.items() if not able[name]}
    why = [f"no run of {name} can be compared ({run.not_compared})" for name, run in first.items()]
    return listed(why, most=3)


MOST_PARTS = 20
"""Most tasks and suites that are fitted, as each fit takes a fraction of a second."""


def parts_of(
    run: ShownRun, names: Iterable[str], price: float | None = None, **options: Any
) -> dict[str, ShownRun]:
    """Return tasks and suites of a run by name, each with its own fit, without unrecorded ones.

    A number given as `r0` is ignored here, as it is the pass rate of all tasks together.

    Raises:
        InputError: an option is not valid.
    """
    options |= {"r0": None} if isinstance(options.get("r0"), float) else {}
    found: dict[str, ShownRun] = {}
    for name in dict.fromkeys(itertools.islice(names, MOST_PARTS)):
        assert run.record is not None
        try:
            record = of_task(run.record, name)
            points = Points.from_record(record, run.points.axis, price)
        except InputError:  # a damaged line of the record must not spoil the other answers
            continue
        part = ShownRun(f"{name} (task)" if name == run.name else name, points, record)
        found[name] = part.fitted_with(**options)
    return found


def warnings_of(run: ShownRun) -> list[str]:
    """Return the warnings of reading and fitting a run, each once."""
    return list(dict.fromkeys(map(run.local, run.warnings_of_fit)))


def assumptions(view: RunsView) -> list[str]:
    """Return the assumptions behind the numbers, in sentences."""
    level = percent(view.level)
    labels = ", ".join(family.label for family in FAMILIES)
    said = [
        f"The pass rate is {'; '.join(map(str, view.metrics))}.",
        f"{_compute(view)} All fits are on this axis; on "
        "another, curves are drawn along each run’s own clock, beyond its end as it ran last.",
        *_starts(view),
        f"Intervals are central, at {level}. A, forecasts and bands average families of curves ({labels}) by "
        "their posterior weights; B and C_mid are those of the log-logistic curve, R(C) = R_0 + (A − R_0) / "
        "(1 + (C_mid / C)^B).",
    ]
    if view.min_compute > 0:
        cut = view.unit.show(view.min_compute)
        said.append(f"Evaluations below {cut}, but for those before training, are not fitted.")
    if view.max_compute < math.inf:
        said.append(f"Evaluations above {view.unit.show(view.max_compute)} are not fitted.")
    if view.comparison is not None:
        said.append(view.comparison.priors())
    return said


def _compute(view: RunsView) -> str:
    """Define compute in a sentence, once for all runs, or once for each meaning."""
    by_meaning = grouped((run.name, _meaning(run, view.axis)) for run in view.runs)
    if len(by_meaning) == 1:
        return f"Compute is {next(iter(by_meaning))}."
    parts = [f"{meaning} ({', '.join(names)})" for meaning, names in by_meaning.items()]
    return f"Compute is {'; '.join(parts)}."


def _meaning(run: ShownRun, axis: str) -> str:
    """Return the meaning of a run's compute: our own counters, those of a log, or a column of a table."""
    if run.record is None:
        return f"the column {axis} of the table"
    if not imported(run.record) or axis == "steps":
        return _AXES.get(axis, axis)
    what = {"gpu_hours": "GPU-hours", "dollars": "GPU-hours", "flops": "FLOPs"}.get(axis, axis)
    how = as_mapping(run.record.config.get("taken")).get(what)
    priced = " at a price" if axis == "dollars" else ""
    return f"{what}{priced} by the log" + (f": {how}" if how else "")


START = {
    "given": "given, and held there",
    "measured": "measured; the evaluation enters the fit as the others do",
    "fitted": "fitted, as no evaluation before training is used",
}
"""Source of the pass rate before training, by `Fit.r0_source`."""


def _starts(view: RunsView) -> list[str]:
    """Return the source of the pass rate before training, in one sentence for all runs or one per source."""
    by_source = grouped((run.name, run.fit.r0_source) for run in view.runs if run.fit is not None)
    about = "R_0, the pass rate before training, is"
    if len(by_source) == 1:
        (source,) = by_source
        value = f" as {rate(view.r0)}" if source == "given" else ""
        return [f"{about} {START[source].replace('given', f'given{value}')}."]
    return [f"{about} {START[source]}: {', '.join(names)}." for source, names in by_source.items()]


def taken(run: ShownRun) -> str:
    """Return how the metrics of another trainer's log were interpreted; empty for other runs."""
    config = run.record.config if run.record is not None else {}
    if not (said := as_mapping(config.get("taken"))):
        return ""
    source = as_mapping(config.get("source"))
    parts = [f"{what}: {text}" for what, text in said.items()]
    return f"{source.get('format')}, names of {source.get('trainer')}. {'; '.join(parts)}"


def last_measured(run: ShownRun, name: str) -> str:
    """Return the last known value of a field of `EvalPoint`, as a text; a dash if there is none."""
    values = [getattr(point, name) for point in run.record.evals] if run.record is not None else []
    known = next((value for value in reversed(values) if value == value), None)
    return percent(known) if name in ("truncated", "failed") else plain(known)
