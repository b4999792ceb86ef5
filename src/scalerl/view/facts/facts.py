"""Facts about a record beside its curve, as rows: the run, its cost, and its recipe."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalerl.curve.result import Fit
from scalerl.jsonl import flat
from scalerl.numbers import (
    DASH,
    Unit,
    as_float,
    as_mapping,
    duration,
    percent,
    plain,
    rate,
    unit_for,
)
from scalerl.record.devices import is_of_one_device
from scalerl.record.reader import RunRecord
from scalerl.view.facts.frozen import FrozenForecast

Rows = list[tuple[str, str]]
"""Rows of (label, value)."""


def axis_for(run: RunRecord, fit: Fit | None = None, frozen: FrozenForecast | None = None) -> str:
    """Return the compute axis of the page: that of the fit, else of the forecast, else the run's own."""
    if fit is not None:
        return fit.axis
    if frozen is not None:
        return frozen.axis
    return run.default_axis


def known_ceiling(run: RunRecord | None) -> float:
    """Return the ceiling known before the run, from config.json; NaN if unknown, or for one task of a run."""
    known = run.config.get("ceiling") if run is not None and not run.task else None
    return as_float(as_mapping(known).get("value"))


def imported(run: RunRecord) -> bool:
    """Return whether a run was imported from a log, which has no parts of a step and no end of the run."""
    return bool(as_mapping(run.config.get("source")))


def notes(run: RunRecord) -> list[str]:
    """Return the warnings of reading a run and the assumptions about its log, each once."""
    assumed = run.config.get("assumed")
    return list(dict.fromkeys([*run.warnings, *(map(str, assumed) if isinstance(assumed, list) else ())]))


def head(run: RunRecord, axis: str) -> Rows:
    """Return the rows about the run for the head of the page, with compute on `axis`."""
    config, model = run.config, as_mapping(run.config.get("model"))
    last = run.evals[-1]
    spent = float(run.compute(axis).max(initial=0.0))
    path = Path(str(model["path"])).name if model.get("path") else DASH
    rows = [("metric", str(run.metric)), ("model", path)]
    if model.get("parameters"):
        size = unit_for("parameters", as_float(model["parameters"]))
        rows.append(("parameters", size.show(model["parameters"]).removesuffix(" parameters")))
    rows += [
        ("seed", _text(config.get("seed"))),
        ("trainer steps", f"{last.step:,}"),
        ("RL compute", unit_for(axis, spent, is_of_one_device(run, axis)).show(spent)),
        ("evaluations", str(len(run.evals))),
    ]
    base = as_mapping(config.get("base"))
    if base.get("flops") is not None:
        rows.insert(-1, ("base model, apart", _flops_unit(run).show(base["flops"])))
    rows.append(("pass rate", f"{rate(run.evals[0].pass_rate)} → {rate(last.pass_rate)}"))
    if math.isfinite(known_ceiling(run)):
        rows.append(("known ceiling", rate(known_ceiling(run))))
    return rows


def compute_rows(run: RunRecord) -> Rows:
    """Return the rows about everything that counts as training compute."""
    last, flops = run.evals[-1], _flops_unit(run)
    tokens, seconds = unit_for("tokens", last.tokens.generated), last.device_seconds
    split = [
        ("generating", _known(duration(seconds.generate), flops.show(last.flops.generate))),
        ("training", _known(duration(seconds.train), flops.show(last.flops.train))),
        ("idle devices", duration(seconds.idle)),
    ]
    if imported(run):  # a log does not split a step, so only the sum of the recorded parts is meaningful
        whole = duration(seconds.generate + seconds.train + seconds.idle)
        split = [("steps", _known(whole, flops.show(_flops(run)))), *((label, DASH) for label, _ in split)]
    return [
        *split,
        ("tokens generated", tokens.show(last.tokens.generated).removesuffix(" tokens")),
        ("tokens trained", tokens.show(last.tokens.trained).removesuffix(" tokens")),
        ("completions consumed", plain(last.samples)),
        ("groups consumed", plain(last.prompts)),
    ]


def uncounted_rows(run: RunRecord) -> Rows:
    """Return the rows about costs that are not training compute: evaluations, start-up, the base model."""
    last, base = run.evals[-1], as_mapping(run.config.get("base"))
    seconds = last.device_seconds
    rows = [("evaluating", duration(seconds.evaluate))]
    if math.isfinite(seconds.startup):
        rows.append(("starting processes", duration(seconds.startup)))
    if base:
        amount = _flops_unit(run).show(base.get("flops"))
        share = as_float(base.get("flops")) / _flops(run) if _flops(run) > 0 else math.nan
        if math.isfinite(share):
            amount += f" ({percent(share)} of the RL’s)"
        rows.append(("making the base model", _known(duration(base.get("seconds")), amount)))
    if base.get("pass_rate") is not None:
        rows.append(("pass rate of the base model", rate(base["pass_rate"])))
    return rows


def _flops(run: RunRecord) -> float:
    return run.evals[-1].flops.generate + run.evals[-1].flops.train


def _flops_unit(run: RunRecord) -> Unit:
    """Return one unit for all FLOPs of a run; without counters, the unit for its base model."""
    base = as_float(as_mapping(run.config.get("base")).get("flops"))
    return unit_for("flops", _flops(run) if _flops(run) > 0 else base)


def recipe_sections(recipe: Any) -> Iterator[tuple[str, Rows]]:
    """Yield a title and rows for every table of a recipe in full; single values come first."""
    if not isinstance(recipe, Mapping):
        return
    single = {key: value for key, value in recipe.items() if not isinstance(value, Mapping)}
    if single:
        yield "recipe", _leaves(single)
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield str(key), _leaves(value)


def _leaves(tree: Mapping[str, Any]) -> Rows:
    """Return the leaves of a nested mapping: dotted keys and texts."""
    return [(key, _text(value)) for key, value in flat(tree).items()]


def _text(value: Any) -> str:
    if value is None or value != value:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def environment(config: Mapping[str, Any]) -> Rows:
    """Return versions, devices, budget and model from config.json."""
    keys = ("versions", "devices", "budget", "model")
    return _leaves({key: config[key] for key in keys if config.get(key) is not None})


def _known(*amounts: str) -> str:
    return ", ".join(amount for amount in amounts if amount != DASH) or DASH
