"""The content of the main figure, from the record, the fit and the frozen forecast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.record.devices import is_of_one_device
from scalerl.record.reader import RunRecord
from scalerl.view.facts.frozen import Band, FrozenForecast
from scalerl.view.facts.notices import misfit_in_words, part_that_holds
from scalerl.view.numbers import Unit, as_float, as_mapping, pair, percent, unit_for

if TYPE_CHECKING:
    from scalerl.curve import Fit


@dataclass(frozen=True)
class Ceiling:
    """The median of the ceiling A with its interval, and the share of the data that they rest on.

    `A` is NaN in a forecast that was stored without medians: its least-squares A has no such interval.
    """

    data: str
    A: float
    interval: tuple[float, float]
    identified: bool = True


@dataclass(frozen=True)
class Change:
    """The change in a run that no saturating curve describes, and the part of it that one does describe."""

    at: float
    """Compute of the change; NaN where it has no single place."""
    text: str
    keep: tuple[float, float]
    """Range of the part that holds; NaN without one."""
    band: Band | None
    """The curve of that part, from its start to the last evaluation."""


@dataclass(frozen=True)
class CurveView:
    """The content of the main figure, with compute in `unit`; arrays (N,) have an entry per evaluation."""

    unit: Unit
    compute_N: np.ndarray
    pass_rate_N: np.ndarray
    noise_sd_N: np.ndarray
    """0 where it is not known: no bar is drawn."""
    later_N: np.ndarray
    """Whether the evaluation was made after the forecast that is drawn."""
    window: float
    """Compute up to which evaluations were used; NaN where nothing is fitted."""
    band: Band | None
    """The forecast's curve, else that of the fit on all evaluations, where one describes them."""
    change: Change | None
    frozen: FrozenForecast | None
    target: float
    """Compute that the forecast is for; NaN without one."""
    ceilings: tuple[Ceiling, ...]
    known_ceiling: float


def axis_for(run: RunRecord, fit: Fit | None = None, frozen: FrozenForecast | None = None) -> str:
    """Return the compute axis of the page: that of the fit, else of the forecast, else the run's own."""
    if fit is not None:
        return fit.axis
    if frozen is not None:
        return frozen.axis
    return run.default_axis


def curve_view(
    run: RunRecord, fit: Fit | None, frozen: FrozenForecast | None, part: Fit | None = None
) -> CurveView:
    """Gather what is drawn. A forecast on another axis than the fit's is left out of the figure.

    `part` is the fit of the part that holds, which is made here by default.

    Raises:
        InputError: the counters behind the compute axis are missing.
    """
    axis = axis_for(run, fit, frozen)
    if frozen is not None and frozen.axis != axis:
        frozen = None
    compute_N = run.training_compute(axis)
    largest = float(compute_N.max(initial=0.0))
    target = frozen.target_compute if frozen else math.nan
    end = max(largest, target if math.isfinite(target) else 0.0)
    unit = unit_for(axis, end, is_of_one_device(run, axis))
    window = frozen.compute if frozen else (largest if fit is not None else math.nan)
    if part is None and fit is not None:
        part = part_that_holds(fit)
    return CurveView(
        unit=unit,
        compute_N=compute_N / unit.size,
        pass_rate_N=np.array([point.pass_rate for point in run.evals]),
        noise_sd_N=np.nan_to_num([point.noise_sd for point in run.evals]),
        later_N=compute_N > window,
        window=window / unit.size,
        band=_in_unit(frozen.band if frozen else _fitted_band(fit), unit),
        change=_change(fit, part, unit),
        frozen=frozen,
        target=target / unit.size,
        ceilings=_ceilings(fit, frozen, part),
        known_ceiling=known_ceiling(run),
    )


def fit_view(fit: Fit, last: float = 0.0) -> CurveView:
    """Return a fit alone, with its points: compute in the unit of the axis, and the curve up to `last`."""
    largest = float(fit.points.compute_N.max())
    part = part_that_holds(fit)
    return CurveView(
        unit=Unit(1.0, fit.axis),
        compute_N=fit.points.compute_N,
        pass_rate_N=fit.points.pass_rate_N,
        noise_sd_N=np.nan_to_num(fit.points.noise_sd_N),
        later_N=np.zeros(len(fit.points), dtype=bool),
        window=math.nan,
        band=_fitted_band(fit, last),
        change=_change(fit, part, Unit(1.0, fit.axis), unit_for(fit.axis, largest)),
        frozen=None,
        target=math.nan,
        ceilings=_ceilings(fit, None, part),
        known_ceiling=math.nan,
    )


def known_ceiling(run: RunRecord) -> float:
    """Return the ceiling that was known before the run, from config.json; NaN without one."""
    return as_float(as_mapping(run.config.get("ceiling")).get("value"))


def ceiling_why(run: RunRecord) -> str:
    """Return how that ceiling is known, from config.json; empty without one."""
    return str(as_mapping(run.config.get("ceiling")).get("why") or "")


def _ceilings(fit: Fit | None, frozen: FrozenForecast | None, part: Fit | None) -> tuple[Ceiling, ...]:
    found = [_ceiling(f"first {percent(frozen.share)}", frozen.fit)] if frozen else []
    if fit is not None:
        found.append(_ceiling("all data", fit.to_json()))
    if part is not None:
        found.append(_ceiling("part fitted", part.to_json()))
    return tuple(ceiling for ceiling in found if ceiling)


def _ceiling(data: str, fit_json: Mapping[str, Any]) -> Ceiling | None:
    A = as_float(as_mapping(fit_json.get("median")).get("A"))
    interval = pair(as_mapping(fit_json.get("intervals")).get("A"))
    identified = bool(fit_json.get("identified", True))
    return Ceiling(data, A, interval, identified) if np.isfinite([A, sum(interval)]).any() else None


def _fitted_band(fit: Fit | None, last: float = 0.0) -> Band | None:
    if fit is None or fit.misfit is not None:
        return None
    compute_N = fit.points.compute_N[fit.points.compute_N > 0]
    return _band(fit, compute_N.min() / 2, max(compute_N.max(), last))


def _band(fit: Fit, first: float, last: float) -> Band:
    compute_M = np.geomspace(first, last, 120)
    return Band(compute_M, *fit.band(compute_M))


def _change(fit: Fit | None, part: Fit | None, unit: Unit, said: Unit | None = None) -> Change | None:
    """Return the change of a misfit in `unit`; the unit of its text is `said`, where given."""
    if fit is None or fit.misfit is None:
        return None
    at = math.nan if fit.misfit.at is None else fit.misfit.at / unit.size
    keep, band = (math.nan, math.nan), None
    if part is not None and fit.misfit.keep is not None:
        low, high = fit.misfit.keep
        keep = low / unit.size, high / unit.size
        positive_N = part.points.compute_N[part.points.compute_N > 0]
        band = _band(part, max(low, positive_N.min() / 2), float(fit.points.compute_N[-1]))
    place = "" if fit.misfit.at is None else f" at {(said or unit).show(fit.misfit.at)}"
    return Change(at, f"{misfit_in_words(fit.lack_of_fit)}{place}", keep, _in_unit(band, unit))


def _in_unit(band: Band | None, unit: Unit) -> Band | None:
    return band and Band(band.compute_M / unit.size, band.median_M, band.lo_M, band.hi_M)
