"""The report of a study: what its tables, figures and files say is what its verdict says."""

import csv
import html.parser
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, compare, fit
from scalerl.curve.freeze import freeze
from scalerl.curve.sides import given_family
from scalerl.errors import CannotAnswerError
from scalerl.record import DeviceSeconds, EvalPoint, RunRecord
from scalerl.report.frozen import FrozenForecast, judge
from scalerl.run_writer import RunWriter
from scalerl.study import formats
from scalerl.study.curves import recipe_draws
from scalerl.study.record import StudyRecord
from scalerl.study.verdict import (
    ArmSummary,
    Estimate,
    FittedRun,
    ForecastScore,
    JudgedForecast,
    Stability,
    StudyVerdict,
)

BUDGET, R_0 = 12_000.0, 0.3
ARMS = {
    "base": (0.60, 1.9, 2500.0),
    "loss=dapo": (0.55, 1.9, 2500.0),
    "<script>alert('a_b & 5%')</script>": (0.60, 1.9, 1650.0),
    "=cmd|' /C calc'!A0": (0.603, 1.9, 2500.0),
}


def write_run(folder, rng, truth, until=1.0, finished=True, truncated=math.nan):
    """A run with an evaluation every 400 GPU-hours along the curve (A, B, C_mid)."""
    A, B, C_mid = truth
    compute = np.arange(0, int(BUDGET * until) + 1, 400.0)
    rates = Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(compute) + rng.normal(0, 0.005, len(compute))
    writer = RunWriter(folder, {"name": folder.parent.name})
    for step, (hours, rate) in enumerate(zip(compute, rates, strict=True)):
        seconds = DeviceSeconds(hours * 3000.0, hours * 500.0, 0.0, hours * 100.0)
        point = EvalPoint(step * 100, float(rate), device_seconds=seconds, truncated=truncated)
        writer.evaluation(point, "held-out", ["p"], np.array([1]))
    writer.close()
    if finished:
        (folder / "checkpoints" / "final").mkdir(parents=True)


def write_study(folder, arms, seeds=2, draw=7, **plan):
    """The folder of a study; an arm whose truth is None never got to an evaluation."""
    rng = np.random.default_rng(draw)
    runs, attempts = [], []
    for place, (name, truth) in enumerate(arms.items()):
        for seed in range(seeds):
            where = f"runs/{place}/seed{seed}"
            runs.append({"arm": name, "seed": seed, "model": "m", "folder": where})
            key = f"{name} seed {seed}"
            if truth is None:
                attempts += [
                    {"run": key, "outcome": "failed", "cause": "out of memory | at step_3", "seconds": 1.0}
                ] * 3
            else:
                # The last arm has one seed that was cut short, and the others log their truncation.
                cut = place == len(arms) - 1 and seed == 1
                write_run(
                    folder / where, rng, truth, 0.4 if cut else 1.0, not cut, 0.02 if place else math.nan
                )
                attempts.append({"run": key, "outcome": "done", "cause": "", "seconds": 9.0})
    (folder / "runs" / "0" / "seed0" / "report.html").write_text("a page")
    document = {
        "schema": 1,
        "name": folder.name,
        "kind": "arms",
        "base": next(iter(arms)),
        "axis": "gpu_hours",
        "budgets": [3000.0, 6000.0, BUDGET],
        "target": 0.55,
        "price": None,
        "retries": 2,
        "warnings": ["<b>seeds</b> & little else"],
        "design": None,
        "arms": [{"name": n, "changes": {"loss": {"kind": n}}, "recipe": {}} for n in arms],
        "runs": runs,
        **plan,
    }
    (folder / "study.json").write_text(json.dumps(document))
    (folder / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in attempts))
    last = list(arms)[-1]
    decisions = [
        {
            "decision": "stopped",
            "arm": last,
            "budget": 6000.0,
            "probability": 0.03,
            "best": "base",
            "saved": 9e3,
        },
        {"decision": "learning rate", "arm": "base", "value": 2e-4, "tried": {"1e-4": 0.41, "2e-4": 0.45}},
    ]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in decisions))
    return StudyRecord.read(folder)


def fitted(run):
    if run.record is None:
        return FittedRun(run, None, "no evaluation yet")
    try:
        return FittedRun(run, fit(run.record, x="gpu_hours"))
    except CannotAnswerError as error:
        return FittedRun(run, None, str(error))


def estimates(recipes, name, seed_prior):
    draws = recipe_draws(recipes, name, lambda family: given_family(recipes, seed_prior, family))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = (draws.A_n - draws.R_0_n) / (0.55 - draws.R_0_n) - 1
        reach = np.where(
            ratio > 0,
            np.exp(draws.log_mid_n) * np.maximum(ratio, 1e-9) ** (-1 / np.exp(draws.log_b_n)),
            np.inf,
        )
    values = {
        "A": draws.A_n,
        "B": np.exp(draws.log_b_n),
        "C_mid": np.exp(draws.log_mid_n),
        "pass_rate": draws.curves_at(np.array([BUDGET]))[:, 0],
        "compute_to_target": reach,
    }
    found = {}
    for key, value in values.items():
        low, median, high = np.quantile(value, [0.025, 0.5, 0.975], method="lower").tolist()
        found[key] = Estimate(median, (low, high))
    return found


def judged_forecasts(study):
    """Frozen at a quarter and at half of every finished run, and held against its end."""
    found = []
    for run in study.runs:
        if run.record is None:
            continue
        compute = run.record.compute("gpu_hours")
        for share in (0.25, 0.5):
            part = RunRecord(
                run.record.path,
                {},
                tuple(np.array(run.record.evals, dtype=object)[compute <= share * BUDGET]),
            )
            forecast = FrozenForecast.from_row(freeze(part, "gpu_hours", BUDGET))
            rivals = {"power law": forecast.mean + 0.02, "last value": part.evals[-1].pass_rate}
            found.append(
                JudgedForecast(run.plan.arm, run.plan.seed, forecast, judge(run.record, forecast), rivals)
            )
    return tuple(found)


def scored(forecasts, share):
    told = [f for f in forecasts if f.outcome.measured and abs(f.forecast.share - share) < 0.1]
    errors = np.array([f.forecast.mean - f.outcome.measured.pass_rate for f in told])
    widths = [f.forecast.width for f in told]
    rms, bias = float(np.sqrt(np.mean(errors**2))), float(errors.mean())
    inside = float(np.mean([f.outcome.inside for f in told]))
    mean_width = float(np.mean(widths))
    return ForecastScore(
        share, len(told), inside, mean_width, 1.2 * mean_width, rms, bias, {"power law": 2 * rms}
    )


def build(folder, arms=ARMS, seeds=2, draw=7, **plan):
    """A verdict as `judge_study` makes it, from a simulated study."""
    folder.mkdir(parents=True, exist_ok=True)
    study = write_study(folder, arms, seeds, draw, **plan)
    runs = {name: tuple(fitted(run) for run in study.of_arm(name)) for name in arms}
    recipes = {n: [r.fit for r in found if r.fit] for n, found in runs.items() if any(r.fit for r in found)}
    comparison = None
    if len(recipes) > 1 and study.plan["base"] in recipes:
        comparison = compare(recipes, base=study.plan["base"], budget=BUDGET, target=0.55)
    prior = compare.__kwdefaults__["seed_prior"]
    arms_found = []
    for place, (name, found) in enumerate(runs.items()):
        outcomes = {}
        for run in found:
            outcomes[run.run.outcome] = outcomes.get(run.run.outcome, 0) + 1
        causes = tuple(dict.fromkeys(run.run.cause for run in found if run.run.cause))
        alarms = {"truncated": 1, "<i>entropy</i>": 2} if place == 1 else {}
        truncated = 0.02 if place else math.nan
        quantities = estimates(recipes, name, prior) if name in recipes else {}
        identified = sum(run.fit.identified for run in found if run.fit)
        stability = Stability(outcomes, len(causes), causes, alarms, truncated)
        arms_found.append(ArmSummary(name, found, quantities, identified, stability))
    missing = {name: "no run could be fitted" for name in runs if name not in recipes}
    forecasts = judged_forecasts(study)
    scores = tuple(scored(forecasts, share) for share in (0.25, 0.5)) if forecasts else ()
    cautions = ("The importance ratios of <loss> never left 1, so the losses are one.",)
    return StudyVerdict(
        study, "gpu_hours", BUDGET, tuple(arms_found), comparison, missing, forecasts, scores, cautions
    )
