"""A simulated study whose names are hostile to every format: HTML, LaTeX, formulas of spreadsheets."""

import json
import math
import re
from dataclasses import replace

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.forecast.freeze import freeze
from scalerl.jsonl import dumps
from scalerl.record.evaluation import DeviceSeconds, EvalPoint
from scalerl.record.writer import RunWriter
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.verdict import judge_study

BUDGET, R_0 = 12_000.0, 0.3
ARMS = {
    "base": (0.60, 1.9, 2500.0),
    "loss=dapo": (0.55, 1.9, 2500.0),
    "<script>alert('a_b & 5%')</script>": (0.60, 1.9, 1650.0),
    "=cmd|' /C calc'!A0": (0.603, 1.9, 2500.0),
}


def write_run(folder, rng, truth, until=1.0, finished=True, truncated=math.nan, jump=0.0):
    """A run with an evaluation every 400 GPU-hours on the curve (A, B, C_mid), and a jump past its middle."""
    A, B, C_mid = truth
    compute = np.arange(0, int(BUDGET * until) + 1, 400.0)
    rates = Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(compute) + rng.normal(0, 0.005, len(compute))
    rates = rates + jump * (compute > 0.6 * BUDGET)
    writer = RunWriter(folder, {"name": folder.parent.name})
    for step, (hours, rate) in enumerate(zip(compute, rates, strict=True)):
        seconds = DeviceSeconds(hours * 3000.0, hours * 500.0, 0.0, hours * 100.0)
        point = EvalPoint(step * 100, float(rate), device_seconds=seconds, truncated=truncated)
        writer.evaluation(point, "held-out", ["p"], np.array([1]))
    writer.close()
    if finished:
        (folder / "checkpoints" / "final").mkdir(parents=True)


def write_study(folder, arms, seeds=2, draw=7, jump=0.0, **plan):
    """The folder of a study. An arm without a truth has no evaluation; the first run of the base may jump."""
    rng = np.random.default_rng(draw)
    runs, attempts = [], []
    last = max((n for n, truth in enumerate(arms.values()) if truth), default=0)
    for place, (name, truth) in enumerate(arms.items()):
        for seed in range(seeds):
            where = f"runs/{place}/seed{seed}"
            runs.append({"arm": name, "seed": seed, "model": "m", "folder": where})
            key = f"{name} seed {seed}"
            if truth is None:
                attempts += [
                    {
                        "run": key,
                        "outcome": "failed",
                        "cause": "no memory | at step_3",
                        "seconds": 1,
                        "until": 1e4,
                    }
                ] * 3
            else:
                # The last such arm has one seed that was cut short, and the others log their truncation.
                cut = place == last and seed == 1
                until, truncated = 0.6 if cut else 1.0, 0.02 if place else math.nan
                first = place == seed == 0
                write_run(folder / where, rng, truth, until, not cut, truncated, jump if first else 0.0)
                attempts.append({"run": key, "outcome": "done", "cause": "", "seconds": 9.0, "until": 1e4})
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
        "arms": [{"name": n, "changes": {"loss": {"kind": n}}, "recipe": {}} for n in arms],
        "runs": runs,
        **plan,
    }
    (folder / "study.json").write_text(json.dumps(document))
    (folder / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in attempts))
    decisions = [
        {
            "decision": "stopped",
            "arm": list(arms)[-1],
            "budget": 6000.0,
            "probability": 0.97,
            "saved": 9e3,
        },
        {"decision": "learning rate", "arm": "base", "value": 2e-4, "tried": {"1e-4": 0.41, "2e-4": 0.45}},
    ]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in decisions))
    return StudyRecord.read(folder)


def frozen(run):
    """Forecasts of the end at a quarter and at half of a run, as the study keeps them."""
    compute = run.record.compute("gpu_hours")
    for share in (0.25, 0.5):
        early = tuple(np.array(run.record.evals, dtype=object)[compute <= share * BUDGET])
        yield {"run": run.plan.key, **freeze(replace(run.record, evals=early), "gpu_hours", BUDGET)}


def build(folder, arms=ARMS, seeds=2, draw=7, jump=0.0, forecast=True, **plan):
    """The verdict of a simulated study, one arm with alarms of another kind than there are."""
    folder.mkdir(parents=True, exist_ok=True)
    study = write_study(folder, arms, seeds, draw, jump, **plan)
    rows = [row for run in study.runs if run.record and forecast for row in frozen(run)]
    (folder / "forecasts.jsonl").write_text("".join(dumps(row) + "\n" for row in rows))
    verdict = judge_study(StudyRecord.read(folder))
    alarms = {"truncated": 1, "<i>entropy</i>": 2}
    found = [
        replace(arm, stability=replace(arm.stability, alarms=alarms)) if place == 1 else arm
        for place, arm in enumerate(verdict.arms)
    ]
    cautions = ("The importance ratios of <loss> never left 1, so the losses are one.",)
    return replace(verdict, arms=tuple(found), cautions=cautions)


FAILED = "failed_everywhere 100% & {more} \\x $2^3 ~#"


def check_latex(text):
    """Groups and environments close, every row has its cells, and no special letter stands bare."""
    opened, rows, width = [], 0, 0
    for line in text.splitlines():
        code = re.sub(r"(?<!\\)%.*", "", line)
        for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", code):
            if kind == "begin":
                opened.append(name)
            else:
                assert opened.pop() == name
        shape = re.search(r"\\begin\{(?:tabular|longtable)\}\{((?:[lr]|p\{\d+em\})+)\}$", code)
        if shape:
            width = len(re.findall(r"[lr]|p\{\d+em\}", shape[1]))
        elif code.endswith(r"\\") and "&" in code:
            assert len(re.findall(r"(?<!\\)&", code)) == width - 1, line
            assert not re.search(r"(?<!\\)[_#^~]", re.sub(r"(?<!\\)\$.*?(?<!\\)\$", "", code)), line
            assert code.count("$") % 2 == code.count(r"\$") % 2, line
            rows += 1
    assert not opened
    bare = re.sub(r"\\[{}\\]", "", text)
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    return rows
