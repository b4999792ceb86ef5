"""A fit as rows of label and text, for `scalerl fit` and notebooks.

Also a warning if an amount of compute lies far beyond the data, as it may be in another unit.
"""

import math
from collections.abc import Iterable, Sequence

from scalerl.curve.answers import FAR, span
from scalerl.curve.families import LABELS
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import listed
from scalerl.numbers import amount_text, as_float, as_mapping, axis_name, one_unit, percent
from scalerl.record.evaluation import unit_of
from scalerl.record.reader import RunRecord


def fit_rows(
    result: Fit, at: Sequence[float] = (), target: float | None = None, budget: float | None = None
) -> list[tuple[str, str]]:
    """Return all rows of a fit: its answers first, then their basis."""
    return [*answer_rows(result, at, target, budget), *basis_rows(result)]


def answer_rows(
    result: Fit, at: Sequence[float] = (), target: float | None = None, budget: float | None = None
) -> list[tuple[str, str]]:
    """Return rows of the ceiling, forecasts at the computes `at`, and the verdict if there is a target.

    With a prior from sibling runs, the same rows follow under that prior.
    """
    asked_at = [budget] if target is not None and budget is not None and budget not in at else []
    intervals = result.intervals
    shown = f"{result.median.A:.3f}   {percent(intervals.level)} {span(intervals.A)}"
    rows = [
        ("ceiling A", "withheld" if result.misfit else shown),
        ("ceiling identified", f"{'yes' if result.identified else 'no'}: {result.why}"),
    ]
    if result.identification.waits and not result.misfit and not result.reservation:
        place = "more than 8 times the compute so far, by a rough guess"
        if needed := result.compute_to_identify:
            moves = result.identification.ratio >= 1
            sure = "an estimate that will change" if moves else "a rough guess"
            place = f"about {amount_text(result.axis, float(f'{needed:.2g}'))}, {sure}"
        rows.append(("identified from", place))
    for amount in (*at, *asked_at):
        f = result.forecast(amount)
        spans = f"curve {span(f.interval)}   evaluation {span(f.prediction)}   rerun {span(f.rerun)}"
        rows.append((f"at {amount_text(result.axis, amount)}", f"{f.median:.3f}   {spans}"))
    if target is not None and budget is not None:
        asked, chance = f"{target:g} at {amount_text(result.axis, budget)}", result.chance(target, budget)
        rows += [(asked, chance.answer), (f"{asked}, rerun", chance.answer_rerun)]
        rows.append(("because", chance.why))
    if result.campaign:
        informed = result.campaign
        rows += [("", ""), ("prior", informed.prior), *answer_rows(informed, at, target, budget)]
    return rows


def known_at(result: Fit, record: RunRecord | None, at: Sequence[float], budget: float | None) -> list[float]:
    """Return the computes at which to forecast: the requested ones, and ten times the data for the ceiling.

    Without requested ones, it is the run's own budget if it lies ahead, else twice the data. If no curve
    describes the run, only the requested ones are returned.
    """
    asked = [*at, *([] if budget is None else [budget])]
    if result.misfit:
        return asked
    now = float(result.points.compute_N[-1])
    own = own_budget(record, result.axis)
    return list(dict.fromkeys([*(asked or [own if own > now else 2 * now]), FAR * now]))


def basis_rows(result: Fit) -> list[tuple[str, str]]:
    """Return rows about the fitted data, the metric first, and the other statistics of the fit."""
    median, intervals = result.median, result.intervals
    left_out = result.left_out
    cut = f", {len(left_out) or 'none'} left out"
    unit = unit_of(result.axis)
    by_prompt = ", measured by prompt" if result.noise.floor_from == "prompts" else ""
    known = "" if math.isnan(result.noise.floor) else f" (sampling alone {result.noise.floor:.4f}{by_prompt})"
    rows = [
        ("metric", str(result.metric)),
        *([("other metrics", listed(result.metric.others))] if result.metric.others else []),
        ("points", f"{result.n_points} on {axis_name(result.axis)}{cut}"),
        *(("left out", text) for text in left_out.rows()),
        ("efficiency B", f"{median.B:.3g}   {span(intervals.B, '.3g')}"),
        ("C_mid", f"{median.C_mid:.4g}   {span(intervals.C_mid, '.4g')} {unit}"),
        ("least squares (paper)", result.least_squares),
        ("R_0", f"{result.r0_value:.3f}   {result.r0_source}"),
        ("noise sd", f"{result.noise.sd:.4f}{known}, autocorrelation {result.noise.phi:.2f}"),
    ]
    if abs(result.noise.wander) > result.noise.sd:  # off the curve by more than an evaluation's noise
        rows.append(("wander", f"{result.noise.wander:+.3f} so far"))
    weights = sorted(result.families.items(), key=lambda item: -item[1])
    families = [f"{LABELS.get(name, name)} {weight:.2f}" for name, weight in weights if weight >= 0.005]
    rows += [("families", ", ".join(families)), ("prior", result.prior)]
    if len(result.basins) > 1 and not result.misfit:
        rows.append(("other minima", "; ".join(str(curve) for curve, _ in result.basins[1:])))
    return rows


def task_row(name: str, result: Fit | None, reason: str, at: Sequence[float] = ()) -> tuple[str, str]:
    """Return a row about the curve of one task of a mixture; without a fit, the reason."""
    if result is None:
        return (f"task {name}", f"no curve: {reason}")
    last = float(result.points.pass_rate_N[result.points.compute_N.argmax()])
    ceiling = "withheld" if result.misfit else f"{result.median.A:.3f} {span(result.intervals.A)}"
    said = [f"last {last:.3f}", f"ceiling A {ceiling}{'' if result.identified else ', not identified'}"]
    for amount in at:
        forecast = result.forecast(amount)
        said.append(
            f"at {amount_text(result.axis, amount)}: {forecast.median:.3f} {span(forecast.prediction)}"
        )
    return (f"task {name}", "   ".join(said))


def worth_rows(result: Fit, worth: float) -> list[tuple[str, str]]:
    """Return rows on where to stop if a further unit of compute must gain `worth`."""
    now = float(result.points.compute_N[-1])
    gain, stop = result.gain_per_unit(now), result.stop_at(worth)
    place = f"at {stop:.4g}" if math.isfinite(stop) else "not within 32 times the compute"
    place = "now" if stop <= now else place
    return [
        (f"gain per {one_unit(result.axis)}", f"{gain:.3g} of pass rate now"),
        ("stop", f"{place}: from there a further unit gains less than {worth:g}"),
    ]


def own_budget(record: RunRecord | None, axis: str) -> float:
    """Return the budget in a run's config.json; NaN if it has none on `axis`."""
    own = as_mapping(record.config.get("budget")) if record is not None else {}
    return as_float(own.get("amount")) if own.get("kind") == axis else math.nan


def common_budget(runs: Iterable[tuple[RunRecord | None, str]]) -> float:
    """Return the `own_budget` common to all runs, each given with its axis; NaN if they differ."""
    own = {own_budget(record, axis) for record, axis in runs}
    return own.pop() if len(own) == 1 else math.nan


def beyond(amounts: Iterable[float], runs: Sequence[tuple[Points, RunRecord | None]]) -> str:
    """Return one warning for all amounts more than `FAR` times the compute of runs; empty without any.

    `runs` are points on one axis, in whose unit the amounts are, and their records (None for a table). If the
    largest amount would be plausible on another axis of the runs, the warning names that axis.
    """
    axis = runs[0][0].axis
    reach = max(float(points.compute_N.max(initial=0.0)) for points, _ in runs)
    far = sorted({amount for amount in amounts if FAR * reach < amount < math.inf})
    if not far or reach <= 0:
        return ""
    named = " and ".join(dict.fromkeys(f"{amount:.10g}" for amount in (far[0], far[-1])))
    times = f"{'is' if len(far) == 1 else 'are up to'} {float(f'{far[-1] / reach:.3g}'):,.10g} times beyond"
    unit = unit_of(axis)
    said = f"{named} {unit} {times} the data, which reach {reach:.4g} {unit}"
    reached: dict[str, float] = {}
    for points, record in runs:
        if record is not None:
            own = {one: float(record.training_compute(one).max(initial=0.0)) for one in record.logged_axes()}
        else:
            own = {"steps": 0.0 if points.step_N is None else float(points.step_N.max(initial=0.0))}
        reached |= {name: max(reached.get(name, 0.0), end) for name, end in own.items()}
    near = {
        name: abs(math.log(far[-1] / end))
        for name, end in reached.items()
        if name != axis and 1 / FAR <= far[-1] / max(end, 1e-300) <= FAR
    }
    if near:
        name = min(near, key=lambda one: near[one])
        said += f"; if it was meant in {unit_of(name)}, of which they reach {reached[name]:.4g}: --x {name}"
    return said
