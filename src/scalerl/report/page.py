"""The page `report.html` of one run: everything it says is gathered here, and laid out by report.html."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.errors import CannotAnswerError, WriteError
from scalerl.record import RunRecord, write_atomically
from scalerl.report.curve_figure import curve_svg
from scalerl.report.curve_view import axis_for
from scalerl.report.frozen import FrozenForecast, Outcome, frozen_forecasts, judge, main_forecast, sentence
from scalerl.report.health_figure import health_svg
from scalerl.report.numbers import (
    DASH,
    as_float,
    as_mapping,
    duration,
    percent,
    plain,
    rate,
    rate_interval,
    unit_for,
)
from scalerl.report.parameters import NamedFit, parameter_rows
from scalerl.report.strata import strata, strata_svg
from scalerl.report.terminal import ceiling_text

if TYPE_CHECKING:
    from scalerl.curve import Fit


@dataclass(frozen=True)
class Section:
    """A small table with a heading: rows of (label, value)."""

    title: str
    rows: list[tuple[str, str]]


def write_report(run: RunRecord | str | Path, fit: Fit | None = None, out: Path | None = None) -> Path:
    """Write the page of one run, whole or not at all, and return where it is.

    Args:
        run: the record, or the path of its folder.
        fit: a fit on the whole run; made here where it is left out and the evaluations allow one.
        out: the file to write; by default report.html in the run folder.

    Raises:
        InputError: the folder cannot be read, or the counters behind the compute axis are missing.
        WriteError: the disk does not take the page.
    """
    record = run if isinstance(run, RunRecord) else RunRecord.read(run)
    out = out or record.path / "report.html"
    try:
        write_atomically(out, report_html(record, fit))
    except OSError as error:
        raise WriteError(f"{out}: {error.strerror or error}") from error
    return out


def report_html(run: RunRecord, fit: Fit | None = None) -> str:
    """The page as text; the same for the same input."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(_content(run, fit))


def _content(run: RunRecord, fit: Fit | None) -> dict[str, Any]:
    forecasts = frozen_forecasts(run)
    outcomes = [judge(run, forecast) for forecast in forecasts]
    frozen = main_forecast(forecasts)
    outcome = outcomes[forecasts.index(frozen)] if frozen else None
    no_fit = ""
    if fit is None:
        fit, no_fit = _fit_or_reason(run, axis_for(run, None, frozen))
    steps = run.steps()
    groups = strata(run.eval_prompts())
    fits = _fits(fit, frozen)
    return {
        "name": str(run.config.get("name") or run.path.name),
        "facts": _facts(run, axis_for(run, fit, frozen)),
        "sentence": _result(frozen, outcome, fit, no_fit),
        "verdict": outcome.word.replace(" ", "-") if outcome else "none",
        "no_fit": no_fit,
        "curve": curve_svg(run, fit, frozen=frozen) if run.evals else None,
        "frozen": frozen,
        "forecast_rows": [_forecast_row(f, o) for f, o in zip(forecasts, outcomes, strict=True)],
        "fits": [name for name, _ in fits],
        "parameter_rows": parameter_rows(run, fits, axis_for(run, fit, frozen)),
        "health": health_svg(steps),
        "skipped": sum(bool(row.get("skipped")) for row in steps),
        "n_steps": len(steps),
        "strata": strata_svg(groups, run.evals[0].step, run.evals[-1].step) if groups else None,
        "strata_label": str(run.config.get("strata") or "stratum"),
        "recipe": list(_recipe_sections(run.config.get("recipe"))),
        "accounting": _accounting(run),
        "environment": list(_flat(_environment(run.config))),
        "warnings": _warnings(run, fits),
    }


def _fit_or_reason(run: RunRecord, axis: str) -> tuple[Fit | None, str]:
    """A fit on the whole run, or the sentence that says why there is none."""
    from scalerl.curve import fit

    try:
        return fit(run, x=axis), ""
    except CannotAnswerError as error:
        return None, f"{_without_path(run, str(error))}."


def _fits(fit: Fit | None, frozen: FrozenForecast | None) -> list[NamedFit]:
    """The fits that the table of parameters compares, each in the form of `Fit.to_json`."""
    found: list[NamedFit] = []
    if frozen and frozen.fit:
        found.append((f"frozen at {frozen.share_in_words}", frozen.fit))
    if fit is not None:
        found.append(("fitted on all data", fit.to_json()))
    return found


def _facts(run: RunRecord, axis: str) -> list[tuple[str, str]]:
    """What was run, for the head of the page."""
    config, model = run.config, as_mapping(run.config.get("model"))
    last = run.evals[-1] if run.evals else None
    compute_N = run.compute(axis)
    spent = float(compute_N.max(initial=0.0))
    facts = [("model", Path(str(model["path"])).name if model.get("path") else DASH)]
    if model.get("parameters"):
        size = unit_for("parameters", as_float(model["parameters"]))
        facts.append(("parameters", size.show(model["parameters"]).removesuffix(" parameters")))
    facts += [
        ("seed", _text(config.get("seed"))),
        ("trainer steps", f"{last.step:,}" if last else DASH),
        ("compute", unit_for(axis, spent).show(spent)),
        ("evaluations", str(len(run.evals))),
    ]
    if last:
        facts.append(("pass rate", f"{rate(run.evals[0].pass_rate)} → {rate(last.pass_rate)}"))
    return facts


def _result(frozen: FrozenForecast | None, outcome: Outcome | None, fit: Fit | None, no_fit: str) -> str:
    if frozen and outcome:
        return sentence(frozen, outcome)
    start = "No forecast was frozen during this run."
    if fit is None:
        return f"{start} No curve is fitted: {no_fit}"
    return f"{start} Fitted on all evaluations: ceiling A {ceiling_text(fit.to_json(), float('nan'))}."


def _forecast_row(forecast: FrozenForecast, outcome: Outcome) -> dict[str, str]:
    unit = unit_for(forecast.axis, forecast.target_compute)
    measured = outcome.measured
    return {
        "step": f"{forecast.made_at_step:.0f}" if forecast.made_at_step >= 0 else DASH,
        "share": percent(forecast.share),
        "target": unit.show(forecast.target_compute),
        "mean": rate(forecast.mean),
        "interval": rate_interval(forecast.prediction),
        "width": rate(forecast.width),
        "measured": rate(measured.pass_rate) if measured else DASH,
        "noise": f"± {rate(measured.noise_sd)}" if measured and measured.noise_sd > 0 else "",
        "verdict": outcome.word,
    }


def _recipe_sections(recipe: Any) -> Iterator[Section]:
    """The resolved recipe, one section per table of it; single values come first."""
    if not isinstance(recipe, Mapping):
        return
    single = {key: value for key, value in recipe.items() if not isinstance(value, Mapping)}
    if single:
        yield Section("recipe", list(_flat(single)))
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield Section(str(key), list(_flat(value)))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a nested mapping, as (dotted key, text)."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if value is None or value != value:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _environment(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("versions", "devices", "budget", "model")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _accounting(run: RunRecord) -> dict[str, list[tuple[str, str]]]:
    """What counts as training compute, and what was spent apart from it."""
    if not run.evals:
        return {"counted": [], "apart": []}
    last, base = run.evals[-1], as_mapping(run.config.get("base"))
    flops = unit_for("flops", as_float(last.flops.generate + last.flops.train))
    tokens = unit_for("tokens", last.tokens.generated)
    counted = [
        ("generating", _known(duration(last.device_seconds.generate), flops.show(last.flops.generate))),
        ("training", _known(duration(last.device_seconds.train), flops.show(last.flops.train))),
        ("idle devices", duration(last.device_seconds.idle)),
        ("tokens generated", tokens.show(last.tokens.generated)),
        ("tokens trained", tokens.show(last.tokens.trained)),
        ("completions trained on", plain(last.samples)),
        ("groups trained on", plain(last.prompts)),
    ]
    apart = [("evaluating", duration(last.device_seconds.evaluate))]
    if base:
        amount = unit_for("flops", as_float(base.get("flops"))).show(base.get("flops"))
        apart.append(("making the base model", _known(duration(base.get("seconds")), amount)))
    if base.get("pass_rate") is not None:
        apart.append(("pass rate of the base model", rate(base["pass_rate"])))
    return {"counted": counted, "apart": apart}


def _known(*amounts: str) -> str:
    return ", ".join(amount for amount in amounts if amount != DASH) or DASH


def _warnings(run: RunRecord, fits: list[NamedFit]) -> list[str]:
    found = [_without_path(run, warning) for warning in run.warnings]
    for name, fit in fits:
        found += [f"{name}: {warning}" for warning in fit.get("warnings") or ()]
    return found


def _without_path(run: RunRecord, message: str) -> str:
    """The message without the folder that it is about: a page is shown on other machines."""
    return message.removeprefix(f"{run.evals_file}: ").replace(f"{run.path}{os.sep}", "")
