"""From points to an answer: check them, fit every family, integrate over all possible curves."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from scalerl.curve.answers import NoiseEstimate, check_level, identify, parameters_of
from scalerl.curve.campaign import learn
from scalerl.curve.evidence import from_neighbours
from scalerl.curve.families import LOG_LOGISTIC, Family
from scalerl.curve.least_squares import LeastSquares, least_squares, least_squares_many
from scalerl.curve.misfit import IN_WORDS, Misfit, find_failed, find_fall, find_misfit
from scalerl.curve.own_families import with_extra
from scalerl.curve.points import Points, place_on
from scalerl.curve.posterior import Posterior, posterior
from scalerl.curve.prior import FLAT, PRIORS, SD_RANGE, Prior
from scalerl.curve.result import Fit
from scalerl.curve.sample import MIN_TO_FIT, MIN_TO_JUDGE, Sample, make_sample
from scalerl.curve.seeds import SEED_PRIOR
from scalerl.curve.solver import TOLERANCE
from scalerl.errors import CannotAnswerError, InputError, counted, number_of
from scalerl.record.reader import RunRecord

_ROUGH_STEPS = 8
_LIKELY_CHANGE = 0.5
_UNEVEN_CLOCK = 1.2  # compute per step, highest over lowest tenth, from which a clock is uneven
LITTLE_WEIGHT = 0.05
"""Posterior weight of the log-logistic family below which B and C_mid come with a warning."""


def fit(
    data: RunRecord | Points | Any,
    *,
    x: str | None = None,
    y: str | None = None,
    r0: float | Literal["free"] | None = None,
    min_compute: float | Literal["auto"] = 0.0,
    max_compute: float = math.inf,
    level: float = 0.95,
    price: float | None = None,
    prior: Literal["default", "flat"] = "default",
    prior_from: Sequence[Fit] = (),
    extra_families: Sequence[Family] = (),
) -> Fit:
    """Fit R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B) (arXiv 2510.13786, equation 1), with its intervals.

    Args:
        data: a run (`scalerl.load_run` reads one), points (with their own axis), or a pandas data frame.
        x: the compute axis of a run, one of `record.AXES`; by default that of its budget. For a data frame
            the column of compute; by default `gpu_hours`. For points only their own axis is valid.
        y: for a data frame the column of pass rates, shares in [0, 1]; by default `pass_rate`.
        r0: R_0 where it is known. By default the evaluations at compute 0 enter as data, and R_0 is free;
            "free" leaves those out, and fits R_0 to the rest.
        min_compute: positive compute below this is left out (the paper leaves out the first epoch).
            "auto" leaves nothing out, unless the whole run is a misfit whose later part can be fitted: then
            only that part is fitted, with R_0 free, and a warning says why.
        max_compute: compute above this is left out (what came after a peak or a change).
        level: probability mass of the intervals.
        price: dollars per GPU-hour, for the axis `dollars`.
        prior: "default", which encodes what runs look like, or "flat" over what is measured: see
            `scalerl.curve.prior`. A flat prior needs a run that rises.
        prior_from: fits of three or more sibling runs (same base model and evaluation set, same axis), from
            which the prior of `Fit.campaign` is learnt. Fit them with this `r0` and `min_compute`, so that
            B and A are the same quantities in all of them; they may be longer than this run.
        extra_families: custom curves (`Family`), averaged with `FAMILIES`, by default with Weibull's weight.

    Raises:
        InputError: an argument or the data are not valid.
        CannotAnswerError: fewer than four evaluations; under a flat prior fewer than six, or no rise.
    """
    if min_compute == "auto":
        if prior_from:
            raise InputError(
                "siblings need the min_compute of the run: fit it with 'auto' first, then give it"
            )
        same = {"level": level, "prior": prior, "extra_families": extra_families, "max_compute": max_compute}
        return _part_that_holds(_points_of(data, x, y, price), r0, same)
    check_options(r0, min_compute, max_compute, level)
    chosen = PRIORS.get(prior)
    if chosen is None:
        raise InputError(f"no prior is named {prior!r}: {', '.join(PRIORS)}")
    given = None if r0 is None or r0 == "free" else float(r0)
    points = _points_of(data, x, y, price)
    least = MIN_TO_JUDGE if chosen is FLAT else MIN_TO_FIT
    points, keep_N = _choose(points, r0 is not None, min_compute, max_compute, least)
    kept = points.select(keep_N)
    sample = make_sample(kept, given)
    best = least_squares(sample, LOG_LOGISTIC)
    failures = find_failed(kept, given, best.curve)
    keep_N[keep_N] = ~failures.failed_N
    points, excluded = points.select(keep_N), points.select(~keep_N)
    if failures.said:
        sample = make_sample(points, given)
        best = least_squares(sample, LOG_LOGISTIC)
    # The minima of the other families only start the posterior: in a long valley a rough one is enough.
    others = [family for family in with_extra(extra_families) if family is not LOG_LOGISTIC]
    found = [best, *least_squares_many([sample] * len(others), others, steps=_ROUGH_STEPS)]
    floor = _noise_floor(points)
    rmse = float(np.sqrt(np.mean((points.pass_rate_N - best.curve(points.compute_N)) ** 2)))
    if chosen is FLAT:
        _check_rise(points, given, rmse * math.sqrt(len(points) / max(len(points) - 2, 1)), floor)
    post = _posterior(sample, floor, found, chosen)
    changed, clock = _misfit_of(points, found)
    misfit, suspected = (changed, None) if changed is None or changed.sure else (None, changed)
    r0_value, r0_source = _r0(points, given, best)
    # With the noise sd profiled out the log-likelihood is -n/2 log RSS; 1e-300 is for exact data.
    least, half = best.rss + 1e-300, 0.5 * len(sample)
    basins = tuple(b for b in best.basins if half * math.log((b[1] + 1e-300) / least) <= TOLERANCE)
    bounds = (
        f"the least-squares curve lies on a bound ({name} = {getattr(best.curve, name):.3g})"
        for name in best.at_bounds
    )
    # A run that has peaked or jumped already has a warning of its fall.
    fall = "" if misfit and misfit.kind in ("peaked", "jump") else find_fall(points)
    shape = () if misfit else (*_change(post, points.axis), *_other_shape(post))
    shape = (*(() if changed is None else (_misfit_warning(changed),)), *shape)
    result = Fit(
        axis=points.axis,
        min_compute=min_compute,
        max_compute=max_compute,
        r0_value=r0_value,
        r0_source=r0_source,
        paper_curve=best.curve,
        rmse=rmse,
        **_answers(post, sample, level, points, suspected),
        prior=prior,
        suspected=suspected,
        fallen=fall,
        newest_failed=failures.newest,
        misfit=misfit,
        basins=basins,
        warnings=(
            *filter(None, [fall]),
            *points.warnings,
            *failures.said,
            *_start(points, given),
            *bounds,
            *clock,
            *shape,
        ),
        points=points,
        excluded=excluded,
        sample=sample,
    )
    return _with_campaign(result, prior_from) if prior_from else result


def _part_that_holds(points: Points, r0: float | Literal["free"] | None, options: dict[str, Any]) -> Fit:
    """Fit the whole run, or only what follows the change that makes it a misfit."""
    whole = fit(points, r0=r0, **options)
    low = whole.misfit.keep[0] if whole.misfit and whole.misfit.keep else 0.0
    if whole.misfit is None or low <= whole.points.compute_N[0]:
        return whole
    later = fit(points, r0="free", min_compute=low, **options)
    cause = whole.misfit.why.split(";")[0]
    return replace(later, warnings=(f"left out: {points.axis} below {low:.10g}, as {cause}", *later.warnings))


def _answers(
    post: Posterior, sample: Sample, level: float, points: Points, suspected: Misfit | None
) -> dict[str, Any]:
    """Return the fields of a `Fit` that follow from its posterior, whatever its prior."""
    median, intervals = parameters_of(post, level)
    sd, phi = float(post.sd_J @ post.sd_weight_J), float(post.phi_cells @ post.weight_cells)
    floor = _noise_floor(points)
    floor_from = None if math.isnan(floor) else points.noise_from
    return {
        "median": median,
        "intervals": intervals,
        "families": post.family_weights(),
        "noise": NoiseEstimate(sd, phi, post.moved, floor, SEED_PRIOR.A, floor_from),
        "identification": identify(post, sample, suspected.why.split(";")[0] if suspected else "", level),
        "posterior": post,
    }


def _points_of(data: Any, x: str | None, y: str | None, price: float | None) -> Points:
    if hasattr(data, "columns") and hasattr(data, "iloc"):  # a data frame, without an import of pandas
        named = {name: column for name, column in (("x", x), ("y", y)) if column is not None}
        return Points.from_frame(data, **named, price=price)
    if not isinstance(data, Points | RunRecord):
        raise InputError(
            "fit takes a run (scalerl.load_run(path)), points (scalerl.read_table(path), of arrays "
            "scalerl.Points.from_arrays(x, y)) or a pandas data frame (of polars frame.to_pandas()), "
            f"found {type(data).__name__}"
        )
    if y is not None:
        raise InputError(f"y={y!r} names a column of a data frame; runs and points have their pass rates")
    if isinstance(data, RunRecord):
        return Points.from_record(data, x or data.default_axis, price)
    if x not in (None, data.axis):
        raise InputError(f"{data.source}: the points are on '{data.axis}', not on '{x}': leave out x")
    return data


def _posterior(sample: Sample, floor: float, found: Sequence[LeastSquares], prior: Prior) -> Posterior:
    """Return the posterior, with the noise of one evaluation even where rows are means of several."""
    least = SD_RANGE[0] if math.isnan(floor) else max(floor, SD_RANGE[0])
    # Sampling noise is independent between evaluations, so a mean has sqrt(`each`) times less.
    post = posterior(sample, least / math.sqrt(sample.each), found, prior)
    if sample.each == 1.0:
        return post
    sd_mean = float(post.sd_J @ post.sd_weight_J)
    # The variance of one evaluation is that of its row's mean plus that about the mean.
    return replace(post, sd_J=post.sd_J * math.hypot(sd_mean, sample.scatter) / sd_mean)


def _misfit_of(points: Points, found: Sequence[LeastSquares]) -> tuple[Misfit | None, tuple[str, ...]]:
    """Return the misfit, or instead a warning if the run is not a misfit over its steps.

    A misfit that is not sure must show over the steps as well; otherwise it is dropped.
    """
    misfit = find_misfit(points, found)
    step_N = points.step_N
    if misfit is None or step_N is None or points.axis == "steps" or not (np.diff(step_N) > 0).all():
        return misfit, ()
    by_step = replace(points, compute_N=np.where(points.compute_N == 0, 0.0, step_N))
    if (by_step.compute_N[1:] <= 0).any():
        return misfit, ()
    # R_0 is free here, as in `find_misfit`, whose own sample ignores a given one.
    sample = make_sample(by_step, None)
    again = find_misfit(by_step, [least_squares(sample, one.curve.family) for one in found])
    if again is not None and again.sure >= misfit.sure:
        return misfit, ()
    if not misfit.sure:
        return None, ()
    what = f"{IN_WORDS[misfit.kind]} on {points.axis}, but not in steps"
    if _clock_is_uneven(points.compute_N, step_N):
        return None, (f"{what}: its clock ran unevenly, so fit it on steps, tokens or flops as well",)
    return None, (f"{what}, and its clock ran evenly: it is borderline, so fit it on steps as well",)


def _clock_is_uneven(compute_N: np.ndarray, step_N: np.ndarray) -> bool:
    """Return whether the compute per step varies so much that it can bend a curve."""
    each_N = np.sort(np.diff(compute_N) / np.diff(step_N))
    tenth = max(len(each_N) // 10, 1)
    return bool(each_N[-tenth:].mean() >= _UNEVEN_CLOCK * each_N[:tenth].mean())


def _start(points: Points, given: float | None) -> tuple[str, ...]:
    """Warn where a given R_0 is above what the run shows at its start."""
    if given is None:
        return ()
    early_N = points.pass_rate_N[: max(len(points) // 5, 2)]
    low = float(early_N.mean())
    if given <= low + 3 * float(np.abs(np.diff(points.pass_rate_N)).mean()):
        return ()
    return (
        f"R_0 is given as {given:g}, and the first evaluations are at {low:.3f}: is it of another model?",
    )


def check_options(
    r0: Any = None, min_compute: float = 0.0, max_compute: float = math.inf, level: float = 0.95
) -> None:
    """Raise an InputError unless these are valid options of `fit`."""
    check_level(level)
    if r0 is not None and r0 != "free" and not 0 <= number_of(r0, "R_0, where it is not 'free',") < 1:
        raise InputError(f"R_0 must be a pass rate in [0, 1), found {r0:g}")
    if not 0 <= number_of(min_compute, "min_compute") < number_of(max_compute, "max_compute"):
        raise InputError(
            f"min_compute must be 0 or more, and below max_compute, found {min_compute:g} and {max_compute:g}"
        )


def _choose(
    points: Points, without_start: bool, min_compute: float, max_compute: float, least: int
) -> tuple[Points, np.ndarray]:
    """Return the points by compute, and which are within the cuts, (N,); `min_compute` never cuts 0."""
    # By pass rate too: the order of the rows in a log must not change a digit of the answer.
    points = points.select(np.lexsort((points.pass_rate_N, points.compute_N)))
    keep_N = points.kept_from(min_compute) & (points.compute_N <= max_compute)
    if without_start:
        # A given R_0 takes the place of the evaluation at compute 0; "free" is meant to differ from it.
        keep_N &= points.compute_N > 0
    n = len(np.unique(points.compute_N[keep_N]))
    if n < least:
        found = counted(n, "evaluation")
        if min_compute > 0 or max_compute < math.inf:
            cuts = ["at or above --min-compute"] * (min_compute > 0)
            cuts += ["at or below --max-compute"] * (max_compute < math.inf)
            where = " and ".join(cuts)
            total = len(np.unique(points.compute_N))
            found = f"only {n} of {counted(total, 'evaluation')} {where}"
        elif (kept := int(keep_N.sum())) > n:
            found = f"{kept} evaluations at only {counted(n, 'value')} of {points.axis}"
            found += " (give totals since the start, or choose another column)"
        elif without := points.left_out.rows():
            found += f" ({'; '.join(without)})"
        raise CannotAnswerError(f"{points.source}: {found}; a curve needs at least {least}")
    return points, keep_N


def _r0(
    points: Points, given: float | None, best: LeastSquares
) -> tuple[float, Literal["given", "measured", "fitted"]]:
    """Return the R_0 to report, and its source."""
    if given is not None:
        return given, "given"
    zero_N = points.compute_N == 0
    if zero_N.any():
        return float(points.pass_rate_N[zero_N].mean()), "measured"
    return best.curve.R_0, "fitted"


def _check_rise(points: Points, r0: float | None, sd: float, floor: float) -> None:
    """Raise a CannotAnswerError unless the last third is above the first by twice its error."""
    third = max(len(points) // 3, 1)
    pass_rate_N = points.pass_rate_N
    first = pass_rate_N[:third].mean() if r0 is None else r0
    last = pass_rate_N[-third:].mean()
    sd = max(sd, 0.0 if math.isnan(floor) else floor)
    error = sd * math.sqrt((1 if r0 is None else 0) / third + 1 / third)
    if last - first > 2 * error:
        return
    what, noise = "does not rise:", f"noise {sd:.3f}"
    if last - first < -2 * error:
        # `sd` is the scatter about a rising curve, so it contains the fall. Second differences do not.
        scatter = math.sqrt(float(np.mean(from_neighbours(pass_rate_N) ** 2)) / 1.5)
        what, noise = "falls", f"scatter of neighbours {scatter:.3f}"
    raise CannotAnswerError(
        f"{points.source}: {points.metric.subject} {what} from {first:.3f} (start) to {last:.3f} "
        f"(last third; {noise}), so there is no saturating curve to fit"
    )


def _other_shape(post: Posterior) -> tuple[str, ...]:
    """Warn where the posterior has hardly any weight on the paper's family."""
    weights = post.family_weights()
    own = weights[LOG_LOGISTIC.name]
    if own >= LITTLE_WEIGHT:
        return ()
    best = max(post.families, key=lambda family: weights[family.name])
    return (
        f"the {best.label} curve describes the run better (weight {weights[best.name]:.2f}, log-logistic "
        f"{own:.2f}): B and C_mid are those of the log-logistic; read them with care",
    )


def _change(post: Posterior, axis: str) -> tuple[str, ...]:
    """Report a change of level that is probably part of the curve."""
    probability, change, size = post.likeliest_change()
    if change is None or probability < _LIKELY_CHANGE:
        return ()
    return (
        f"the level changes by {size:+.3f} around {place_on(axis, math.exp(change.log_at))} (probability "
        f"{probability:.2f}): A, B and C_mid are those of the curve after it",
    )


def _misfit_warning(misfit: Misfit) -> str:
    """Return why the ceiling is withheld or not identified, and what can be fitted instead."""
    offer = "no part of it can be fitted alone"
    if misfit.keep is not None:
        low, high = misfit.keep
        start = f"--r0 free --min-compute {_end(low, -1e-9)} " if low > 0 else ""
        offer = f"fit the part that holds with {start}--max-compute {_end(high, 1e-9)}"
    if not misfit.sure:
        return f"the run may have changed, so that no ceiling is identified: perhaps {misfit.why}; {offer}"
    return f"no saturating curve describes this run, and its ceiling is withheld: {misfit.why}; {offer}"


def _end(compute: float, outwards: float) -> str:
    """Print an end with ten digits, without cutting off the evaluations that lie at it."""
    text = f"{compute:.10g}"
    cuts = float(text) > compute if outwards < 0 else float(text) < compute
    return f"{compute * (1 + outwards):.10g}" if cuts else text


def _with_campaign(result: Fit, siblings: Sequence[Fit]) -> Fit:
    """Add the answer under the siblings' prior, or a warning that says why there is none."""
    prior, said = learn(siblings, result)
    if prior is None:
        return replace(result, warnings=(*result.warnings, said))
    post = prior.apply(result.posterior)
    # The warning about the family follows the weights of the fit's own prior: the siblings' may differ.
    own_shape = _other_shape(result.posterior)
    warnings = [warning for warning in result.warnings if warning not in own_shape]
    informed = replace(
        result,
        prior=f"campaign ({prior.n_siblings} siblings)",
        **_answers(post, result.sample, result.intervals.level, result.points, result.suspected),
        warnings=(*warnings, *(() if result.misfit else _other_shape(post))),
    )
    return replace(result, campaign=informed)


def _noise_floor(points: Points) -> float:
    """Return the root mean square of the evaluation noise that is known, NaN if none is."""
    known = points.noise_sd_N[np.isfinite(points.noise_sd_N)]
    return float(np.sqrt(np.mean(known**2))) if len(known) else math.nan
