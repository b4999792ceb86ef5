"""The page `report.html` of one run: everything it says is gathered here, and laid out by report.html."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.errors import CannotAnswerError, counted
from scalerl.record.reader import RunRecord
from scalerl.view.assets import page, without_folders, write_text
from scalerl.view.facts.curve_view import axis_for, ceiling_why, known_ceiling
from scalerl.view.facts.facts import (
    Rows,
    compute_rows,
    environment,
    head,
    notes,
    recipe_sections,
    uncounted_rows,
)
from scalerl.view.facts.frozen import (
    FrozenForecast,
    Outcome,
    frozen_forecasts,
    judge,
    main_forecast,
    sentence,
)
from scalerl.view.facts.notices import (
    WHO_CHECKS,
    alarm_notices,
    alarm_rows,
    ceiling_text,
    health_text,
    misfit_in_words,
    notices,
    part_that_holds,
    to_tell_text,
)
from scalerl.view.facts.standing import StandingQuery, stand
from scalerl.view.figures.curve_figure import curve_svg
from scalerl.view.figures.health_figure import always_zero, health_svg
from scalerl.view.numbers import (
    DASH,
    Unit,
    as_float,
    as_mapping,
    family_weights,
    percent,
    plain,
    plain_interval,
    rate,
    rate_interval,
    unit_for,
)
from scalerl.view.run.roles import in_flight_rows, ledger_rows, role_rows, roles_svg
from scalerl.view.run.strata import strata, strata_svg
from scalerl.view.runs.gathered import START, fit_or_reason
from scalerl.view.runs.overlay import OverlayRun

if TYPE_CHECKING:
    from scalerl.curve import Fit

NamedFit = tuple[str, Mapping[str, Any]]
"""What a fit rests on, in words, and the fit as `Fit.to_json` gives it."""
_PARAMETERS = (
    ("A", "ceiling"),
    ("B", "efficiency exponent"),
    ("C_mid", "compute at half of the gain"),
    ("R_0", "pass rate before training"),
    ("", "least squares (paper)"),
    ("", "level of the intervals"),
    ("", "evaluations used"),
    ("", "last compute over C_mid"),
    ("", "ceiling identified"),
    ("", "compute to tell it"),
    ("", "weights of the families"),
    ("", "noise of one evaluation"),
)
"""Symbol and meaning of each row of the table of parameters."""


def write_report(run: RunRecord | str | Path, out: Path | None = None, *, level: float = 0.95) -> Path:
    """Write the page of one run, whole or not at all, and return where it is.

    Args:
        run: the record, or the path of its folder.
        out: the file to write; by default report.html in the run folder.
        level: of the intervals.

    Raises:
        InputError: the folder cannot be read, or the counters behind the compute axis are missing.
        CannotAnswerError: the run holds no evaluation.
        WriteError: the disk does not take the page.
    """
    record = run if isinstance(run, RunRecord) else RunRecord.read(run)
    return write_text(out or record.path / "report.html", report_html(record, level=level))


def report_html(run: RunRecord, fit: Fit | None = None, *, level: float = 0.95) -> str:
    """Return the page as text; the same for the same input. `level` is that of a fit that is made here.

    Raises:
        CannotAnswerError: the run holds no evaluation.
    """
    if not run.evals:
        raise CannotAnswerError(f"{run.evals_file}: no evaluation yet, so there is nothing to report")
    return page("report.html", _content(run, fit, level))


def _content(run: RunRecord, fit: Fit | None, level: float) -> dict[str, Any]:
    forecasts = frozen_forecasts(run)
    outcomes = [judge(run, forecast) for forecast in forecasts]
    frozen = main_forecast(forecasts)
    outcome = outcomes[forecasts.index(frozen)] if frozen else None
    no_fit = ""
    if fit is None:
        fit, no_fit = _fitted(run, axis_for(run, None, frozen), level)
    axis = axis_for(run, fit, frozen)
    steps = run.steps()
    skipped = sum(bool(row.get("skipped")) for row in steps)
    groups = strata(run.eval_prompts())
    part = part_that_holds(fit) if fit is not None else None
    fits = _fits(frozen, fit, part)
    if frozen and outcome:
        result = sentence(frozen, outcome)
    else:
        result = _now_in_words(run, fit) if fit is not None else f"No curve is fitted: {no_fit}"
    recipe = run.config.get("recipe")
    has_generators = run.config.get("placement") != "inline"
    return {
        "name": run.name,
        "facts": head(run, axis),
        "sentence": result,
        "verdict": outcome.word.replace(" ", "-") if outcome else "none",
        "notices": alarm_notices(run.alarms) + (notices(fit, part) if fit is not None else []),
        "no_fit": no_fit,
        "curve": curve_svg(run, fit, frozen=frozen, part=part),
        "frozen": frozen,
        "misfit": fit is not None and fit.misfit is not None,
        "part": part,
        "now": _now(run, fit) if fit is not None and not forecasts else [],
        "forecast_rows": [_forecast_row(f, o, f is frozen) for f, o in zip(forecasts, outcomes, strict=True)],
        "ceiling_why": ceiling_why(run),
        "fits": [name for name, _ in fits],
        "parameter_rows": _parameter_rows(run, fits, axis),
        "health": health_svg(steps, run.alarms, as_mapping(recipe).get("health")),
        "alarms": alarm_rows(run.alarms),
        "no_alarms": health_text(run) + ("." if run.health_is_watched else f"; {WHO_CHECKS}."),
        "always_zero": always_zero(steps),
        "in_flight": in_flight_rows(steps, recipe),
        "ledger": ledger_rows(steps, run.lost()),
        "roles": roles_svg(steps, has_generators),
        "role_rows": role_rows(steps, has_generators),
        "skipped": counted(skipped, "step") if skipped else "",
        "n_steps": counted(len(steps), "trainer step"),
        "strata": strata_svg(groups, run.evals[0].step, run.evals[-1].step) if groups else None,
        "strata_label": str(run.config.get("strata") or "stratum"),
        "recipe": list(recipe_sections(recipe)),
        "counted": compute_rows(run),
        "apart": uncounted_rows(run),
        "environment": environment(run.config),
        "warnings": _warnings(run, fits, fit.misfit.why if fit and fit.misfit else None),
    }


def _fitted(run: RunRecord, axis: str, level: float) -> tuple[Fit | None, str]:
    """Return a fit on the whole run, or the sentence that says why there is none."""
    from scalerl.curve import Points

    fit, why = fit_or_reason(OverlayRun(run.name, Points.from_record(run, axis), run), level=level)
    return fit, f"{why}." if why else ""


def _fits(frozen: FrozenForecast | None, fit: Fit | None, part: Fit | None) -> list[NamedFit]:
    """The fits that the table of parameters compares, each in the form of `Fit.to_json`."""
    found: list[NamedFit] = []
    if frozen and frozen.fit:
        found.append((f"frozen at {frozen.share_in_words}", frozen.fit))
    if fit is not None:
        found.append(("fitted on all data", fit.to_json()))
    if part is not None:
        found.append(("fitted on the part that holds", part.to_json()))
    return found


def _now_in_words(run: RunRecord, fit: Fit) -> str:
    standing = stand(fit.points, run, StandingQuery())
    forecast = fit.forecast(standing.end)
    where = f"{standing.where} ({standing.unit.show(standing.end)})"
    return (
        f"Fitted on all evaluations, forecast {where}: {rate(forecast.median)} "
        f"{rate_interval(forecast.prediction)}. {'The ceiling is' if fit.misfit else 'Ceiling A'} "
        f"{ceiling_text(fit.to_json(), math.nan)}."
    )


def _now(run: RunRecord, fit: Fit) -> Rows:
    """Return the present forecast, for a run that froze none."""
    standing = stand(fit.points, run, StandingQuery())
    forecast = fit.forecast(standing.end)
    return [
        (standing.where, standing.unit.show(standing.end)),
        ("one evaluation", f"{rate(forecast.median)} {rate_interval(forecast.prediction)}"),
        ("mean curve, interval", rate_interval(forecast.interval)),
        ("another seed, interval", rate_interval(forecast.rerun)),
        ("ceiling A", ceiling_text(fit.to_json(), known_ceiling(run))),
    ]


def _forecast_row(forecast: FrozenForecast, outcome: Outcome, leads: bool) -> dict[str, str]:
    unit = unit_for(forecast.axis, forecast.target_compute)
    measured = outcome.measured
    return {
        "step": f"{forecast.made_at_step:.0f}" if forecast.made_at_step >= 0 else DASH,
        "share": percent(forecast.share),
        "target": unit.show(forecast.target_compute),
        "median": rate(forecast.median),
        "interval": rate_interval(forecast.prediction),
        "width": rate(forecast.width),
        "rerun": rate_interval(forecast.rerun),
        "misfit": misfit_in_words(forecast.fit.get("lack_of_fit")),
        "measured": rate(measured.pass_rate) if measured else DASH,
        "noise": f"± {rate(measured.noise_sd)}" if measured and measured.noise_sd > 0 else "",
        "verdict": outcome.word,
        "leads": "lead" if leads else "",
    }


def _warnings(run: RunRecord, fits: list[NamedFit], noticed: str | None) -> list[str]:
    """The warnings of the record and of the fits, each once; `noticed` is said above them already."""
    found = [_local(run, warning) for warning in notes(run)]
    about: dict[str, list[str]] = {}
    for name, fit in fits:
        for warning in fit.get("warnings") or ():
            if noticed is None or noticed not in str(warning):
                about.setdefault(_local(run, str(warning)), []).append(name)
    return found + [
        f"{', and '.join(names)}: {warning}" for warning, names in about.items() if warning not in found
    ]


def _local(run: RunRecord, message: str) -> str:
    return without_folders(message.removeprefix(f"{run.evals_file}: "), run.path)


def _parameter_rows(run: RunRecord, fits: list[NamedFit], axis: str) -> list[tuple[str, str, list[str]]]:
    """Return rows (symbol, meaning, one cell per fit) of the table of parameters; none without a fit."""
    known, columns = known_ceiling(run), []
    for _, fit in fits:
        own = str(fit.get("axis") or axis)
        columns.append(_parameters(fit, unit_for(own, float(run.compute(own).max(initial=0.0))), known))
    cells = zip(*columns, strict=True)
    return [(*row, list(of_fits)) for row, of_fits in zip(_PARAMETERS, cells, strict=False)]


def _parameters(fit: Mapping[str, Any], unit: Unit, known: float) -> list[str]:
    """Return one cell for each of `_PARAMETERS`; older forecasts stored neither medians nor all intervals."""
    median, intervals = as_mapping(fit.get("median")), as_mapping(fit.get("intervals"))
    r0 = as_mapping(fit.get("r0"))
    source = r0.get("source")
    identified = fit.get("identified")
    word = DASH if identified is None else "yes" if identified else "no"
    ratio = plain(fit.get("c_max_over_c_mid")), plain_interval(fit.get("c_max_over_c_mid_interval"))
    return [
        ceiling_text(fit, known),
        _joined(plain(median.get("B")), plain_interval(intervals.get("B"))),
        _c_mid(median.get("C_mid"), intervals.get("C_mid"), unit),
        rate(r0.get("value")) + (f" ({START.get(source, source)})" if source else ""),
        _least_squares(fit, unit),
        percent(intervals.get("level")),
        plain(fit.get("points")),
        _joined(*ratio),
        f"{word}: {fit['why']}" if fit.get("why") else word,
        to_tell_text(fit, unit) or DASH,
        family_weights(fit.get("families")),
        _noise(as_mapping(fit.get("noise"))),
    ]


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text != DASH) or DASH


def _c_mid(value: Any, interval: Any, unit: Unit) -> str:
    if value is None and interval is not None:
        return f"{plain_interval(interval, unit)} {unit.name}"
    return _joined(unit.show(value), plain_interval(interval, unit))


def _least_squares(fit: Mapping[str, Any], unit: Unit) -> str:
    """Return the paper's triple; it stands apart, as the intervals are not about it."""
    curve = as_mapping(fit.get("fit"))
    if not curve:
        return DASH
    ceiling = "withheld" if fit.get("lack_of_fit") else rate(curve.get("A"))
    shown = f"A {ceiling}, B {plain(curve.get('B'))}, C_mid {unit.show(curve.get('C_mid'))}"
    return shown if curve.get("rmse") is None else f"{shown}, rmse {_fine(curve['rmse'])}"


def _noise(noise: Mapping[str, Any]) -> str:
    parts = [f"sd {_fine(noise.get('sd'))}"]
    if as_float(noise.get("floor")) > 0:
        parts.append(f"of which sampling {_fine(noise['floor'])}")
    if noise.get("phi") is not None:
        parts.append(f"correlation of neighbours {as_float(noise['phi']):.2f}")
    return ", ".join(parts)


def _fine(value: Any) -> str:
    number = as_float(value)
    return f"{number:.4f}".removeprefix("0") if math.isfinite(number) else DASH
