"""The table of a curve's parameters: as frozen during the run, and as fitted on the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalerl.record.reader import RunRecord
from scalerl.view.facts.ceiling import ceiling_text, to_tell_text
from scalerl.view.facts.curve_view import known_ceiling
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
    unit_for,
)
from scalerl.view.runs.gathered import START

NamedFit = tuple[str, Mapping[str, Any]]
"""What a fit rests on, in words, and the fit as `Fit.to_json` gives it."""


def parameter_rows(run: RunRecord, fits: list[NamedFit], axis: str) -> list[tuple[str, str, list[str]]]:
    """Rows (symbol, meaning, one cell per fit) of the table of parameters."""
    if not fits:
        return []
    known = known_ceiling(run)
    return [
        ("A", "ceiling", [ceiling_text(fit, known) for _, fit in fits]),
        ("B", "efficiency exponent", [_parameter(fit, "B") for _, fit in fits]),
        ("C_mid", "compute at half of the gain", [_c_mid(fit, _unit(run, fit, axis)) for _, fit in fits]),
        ("R_0", "pass rate before training", [_start(fit) for _, fit in fits]),
        ("", "least squares (paper)", [_least_squares(fit, _unit(run, fit, axis)) for _, fit in fits]),
        ("", "level of the intervals", [_level(fit) for _, fit in fits]),
        ("", "evaluations used", [plain(fit.get("points")) for _, fit in fits]),
        ("", "last compute over C_mid", [_ratio(fit) for _, fit in fits]),
        ("", "ceiling identified", [_identified(fit) for _, fit in fits]),
        ("", "compute to tell it", [to_tell_text(fit, _unit(run, fit, axis)) or DASH for _, fit in fits]),
        ("", "weights of the families", [family_weights(fit.get("families")) for _, fit in fits]),
        ("", "noise of one evaluation", [_noise(as_mapping(fit.get("noise"))) for _, fit in fits]),
    ]


def _parameter(fit: Mapping[str, Any], name: str) -> str:
    """The median and its interval; the interval alone where no median was stored."""
    value, interval = as_mapping(fit.get("median")).get(name), as_mapping(fit.get("intervals")).get(name)
    return " ".join(part for part in (plain(value), plain_interval(interval)) if part != DASH) or DASH


def _c_mid(fit: Mapping[str, Any], unit: Unit) -> str:
    value, interval = (
        as_mapping(fit.get("median")).get("C_mid"),
        as_mapping(fit.get("intervals")).get("C_mid"),
    )
    if value is None and interval is not None:
        return f"{plain_interval(interval, unit)} {unit.name}"
    return f"{unit.show(value)} {plain_interval(interval, unit)}".removesuffix(f" {DASH}")


def _least_squares(fit: Mapping[str, Any], unit: Unit) -> str:
    """The paper's triple; it stands apart, as the intervals are not about it."""
    curve = as_mapping(fit.get("fit"))
    if not curve:
        return DASH
    ceiling = "withheld" if fit.get("lack_of_fit") else rate(curve.get("A"))
    shown = f"A {ceiling}, B {plain(curve.get('B'))}, C_mid {unit.show(curve.get('C_mid'))}"
    return shown if curve.get("rmse") is None else f"{shown}, rmse {_fine(curve['rmse'])}"


def _unit(run: RunRecord, fit: Mapping[str, Any], axis: str) -> Unit:
    """The unit in which the page shows the run's compute."""
    own = str(fit.get("axis") or axis)
    return unit_for(own, float(run.compute(own).max(initial=0.0)))


def _ratio(fit: Mapping[str, Any]) -> str:
    """C_max / C_mid with its interval; older forecasts stored the least-squares value alone."""
    interval = plain_interval(fit.get("c_max_over_c_mid_interval"))
    return f"{plain(fit.get('c_max_over_c_mid'))} {interval}".removesuffix(f" {DASH}")


def _level(fit: Mapping[str, Any]) -> str:
    return percent(as_mapping(fit.get("intervals")).get("level"))


def _start(fit: Mapping[str, Any]) -> str:
    r0 = as_mapping(fit.get("r0"))
    source = r0.get("source")
    return rate(r0.get("value")) + (f" ({START.get(source, source)})" if source else "")


def _identified(fit: Mapping[str, Any]) -> str:
    known = fit.get("identified")
    word = DASH if known is None else "yes" if known else "no"
    return f"{word}: {fit['why']}" if fit.get("why") else word


def _noise(noise: Mapping[str, Any]) -> str:
    parts = [f"sd {_fine(noise.get('sd'))}"]
    if as_float(noise.get("floor")) > 0:
        parts.append(f"of which sampling {_fine(noise['floor'])}")
    if noise.get("phi") is not None:
        parts.append(f"correlation of neighbours {as_float(noise['phi']):.2f}")
    return ", ".join(parts)


def _fine(value: Any) -> str:
    number = as_float(value)
    return f"{number:.4f}".removeprefix("0") if number == number else DASH
