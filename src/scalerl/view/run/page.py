"""The page `report.html` of one run: everything it says is gathered here, and laid out by report.html."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.errors import CannotAnswerError, WriteError
from scalerl.files import write_atomically
from scalerl.record.reader import RunRecord
from scalerl.view.assets import page, without_folders
from scalerl.view.facts.alarm_rows import WHO_CHECKS, alarm_notices, alarm_rows, health_text
from scalerl.view.facts.ceiling import ceiling_text, misfit_in_words, notices, part_that_holds
from scalerl.view.facts.curve_view import axis_for, ceiling_why, known_ceiling
from scalerl.view.facts.facts import Rows, apart, counted, environment, head, notes, recipe_sections
from scalerl.view.facts.frozen import (
    FrozenForecast,
    Outcome,
    frozen_forecasts,
    judge,
    main_forecast,
    sentence,
)
from scalerl.view.facts.standing import Standing, StandingQuery, stand
from scalerl.view.figures.curve_figure import curve_svg
from scalerl.view.figures.health_figure import always_zero, health_svg
from scalerl.view.numbers import DASH, as_mapping, many, percent, rate, rate_interval, unit_for
from scalerl.view.run.parameters import NamedFit, parameter_rows
from scalerl.view.run.roles import in_flight_rows, ledger_rows, role_rows, roles_svg
from scalerl.view.run.strata import strata, strata_svg
from scalerl.view.runs.gathered import fit_or_reason
from scalerl.view.runs.overlay import OverlayRun

if TYPE_CHECKING:
    from scalerl.curve import Fit, Forecast


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
    out = out or record.path / "report.html"
    try:
        write_atomically(out, report_html(record, level=level))
    except OSError as error:
        raise WriteError(f"{out}: {error.strerror or error}") from error
    return out


def report_html(run: RunRecord, fit: Fit | None = None, *, level: float = 0.95) -> str:
    """The page as text; the same for the same input. `level` is that of a fit that is made here.

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
    steps = run.steps()
    skipped = sum(bool(row.get("skipped")) for row in steps)
    groups = strata(run.eval_prompts())
    part = part_that_holds(fit) if fit is not None else None
    fits = _fits(frozen, fit, part)
    has_generators = run.config.get("placement") != "inline"
    return {
        "name": run.name,
        "facts": head(run, axis_for(run, fit, frozen)),
        "sentence": _result(run, frozen, outcome, fit, no_fit),
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
        "parameter_rows": parameter_rows(run, fits, axis_for(run, fit, frozen)),
        "health": health_svg(steps, run.alarms, as_mapping(run.config.get("recipe")).get("health")),
        "alarms": alarm_rows(run.alarms),
        "no_alarms": health_text(run) + ("." if run.health_is_watched else f"; {WHO_CHECKS}."),
        "always_zero": always_zero(steps),
        "in_flight": in_flight_rows(steps, run.config.get("recipe")),
        "ledger": ledger_rows(steps, run.lost()),
        "roles": roles_svg(steps, has_generators),
        "role_rows": role_rows(steps, has_generators),
        "skipped": many(skipped, "step") if skipped else "",
        "n_steps": many(len(steps), "trainer step"),
        "strata": strata_svg(groups, run.evals[0].step, run.evals[-1].step) if groups else None,
        "strata_label": str(run.config.get("strata") or "stratum"),
        "recipe": list(recipe_sections(run.config.get("recipe"))),
        "counted": counted(run),
        "apart": apart(run),
        "environment": environment(run.config),
        "warnings": _warnings(run, fits, fit.misfit.why if fit and fit.misfit else None),
    }


def _fitted(run: RunRecord, axis: str, level: float) -> tuple[Fit | None, str]:
    """A fit on the whole run, or the sentence that says why there is none."""
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


def _result(
    run: RunRecord, frozen: FrozenForecast | None, outcome: Outcome | None, fit: Fit | None, no_fit: str
) -> str:
    if frozen and outcome:
        return sentence(frozen, outcome)
    if fit is None:
        return f"No curve is fitted: {no_fit}"
    standing, told = _forecast_now(run, fit)
    where = f"{standing.where} ({standing.unit.show(standing.end)})"
    ceiling = ceiling_text(fit.to_json(), float("nan"))
    return (
        f"Fitted on all evaluations, forecast {where}: {rate(told.mean)} {rate_interval(told.prediction)}. "
        f"{'The ceiling is' if fit.misfit else 'Ceiling A'} {ceiling}."
    )


def _forecast_now(run: RunRecord, fit: Fit) -> tuple[Standing, Forecast]:
    """The run as `watch` shows it, and its forecast at the compute that is forecast there."""
    standing = stand(fit.points, run, StandingQuery())
    return standing, fit.forecast(standing.end)


def _now(run: RunRecord, fit: Fit) -> Rows:
    """The forecast of a run that froze none."""
    standing, told = _forecast_now(run, fit)
    return [
        (standing.where, standing.unit.show(standing.end)),
        ("one evaluation", f"{rate(told.mean)} {rate_interval(told.prediction)}"),
        ("mean curve, interval", rate_interval(told.interval)),
        ("another seed, interval", rate_interval(told.rerun)),
        ("ceiling A", ceiling_text(fit.to_json(), known_ceiling(run))),
    ]


def _forecast_row(forecast: FrozenForecast, outcome: Outcome, leads: bool) -> dict[str, str]:
    unit = unit_for(forecast.axis, forecast.target_compute)
    measured = outcome.measured
    return {
        "step": f"{forecast.made_at_step:.0f}" if forecast.made_at_step >= 0 else DASH,
        "share": percent(forecast.share),
        "target": unit.show(forecast.target_compute),
        "mean": rate(forecast.mean),
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
