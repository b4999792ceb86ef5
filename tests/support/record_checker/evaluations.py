"""Rules of evaluations, of forecasts and of the timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from record_checker.form import Record, Row, close, is_whole
from record_checker.steps import due_steps


def evaluations_agree_with_prompts(record: Record) -> Iterator[str]:
    ids: dict[str, list[str]] = {}
    for row, prompts in zip(record.evals, record.prompts, strict=False):
        where, n, correct = f"evaluation {row['step']}", row["n_samples"], prompts["correct"]
        if ids.setdefault(prompts["prompt_set"], prompts["id"]) != prompts["id"] or len(ids) > 1:
            yield f"{where}: other held-out prompts than before"
        if (
            len(set(prompts["id"])) != row["n_prompts"]
            or len(correct) != row["n_prompts"]
            or prompts["n"] != n
        ):
            yield f"{where}: {row['n_prompts']} x {n}, and eval_prompts.jsonl {len(correct)} x {prompts['n']}"
            continue
        yield from _rates_are_of_prompts(row, correct, where)


def _rates_are_of_prompts(row: Row, correct: list[int], where: str) -> Iterator[str]:
    n = row["n_samples"]
    total = row["n_prompts"] * n
    if any(not 0 <= c <= n for c in correct):
        yield f"{where}: a prompt with successes outside 0 to {n}"
    if not close(row["pass_rate"], sum(correct) / total, 1e-12):
        yield f"{where}: pass_rate is {row['pass_rate']}, and its prompts make it {sum(correct) / total}"
    spread = sum(c * (n - c) for c in correct) / (total * (n - 1)) if n > 1 else None
    if (spread is None) != (row["mean_p_1mp"] is None) or not close(row["mean_p_1mp"] or 0, spread or 0):
        yield f"{where}: mean_p_1mp is {row['mean_p_1mp']}, and its prompts make it {spread}"
    if row["version"] != row["step"]:
        yield f"{where}: its version is {row['version']}"
    for name in ("failed", "truncated", "interrupted"):
        if not is_whole(row[name] * total):
            yield f"{where}: {name} is {row[name]} of {total} completions"
    if row["pass_rate"] + row["failed"] > 1 + 1e-9:
        yield f"{where}: {row['pass_rate']} are correct and {row['failed']} failed"


def suites_agree_with_evaluations(record: Record) -> Iterator[str]:
    """Each line has the counters of an evaluation, or of one that is not written yet, and its own rates."""
    at = {row["step"]: row for row in record.evals}
    sets: dict[str, str] = {}
    seen = set()
    for row in record.downstream:
        where, correct = f"suite {row['suite']} at step {row['step']}", row["correct"]
        beside = at.get(row["step"])
        if (row["suite"], row["step"]) in seen:
            yield f"{where}: twice"
        seen.add((row["suite"], row["step"]))
        if beside is None and not record.killed:
            yield f"{where}: no evaluation of that step"
        for key in ("time", "device_seconds", "flops", "tokens", "samples", "prompts"):
            if beside is not None and row[key] != beside[key]:
                yield f"{where}: {key} is not that of the evaluation"
        if sets.setdefault(row["suite"], row["prompt_set"]) != row["prompt_set"]:
            yield f"{where}: other prompts than before"
        if not len(correct) == len(set(row["id"])) == row["n_prompts"]:
            yield f"{where}: {row['n_prompts']} prompts, and {len(correct)} successes"
            continue
        yield from _rates_are_of_prompts(row, correct, where)
        if not close(row["pass_at_k"], sum(c > 0 for c in correct) / len(correct), 1e-12):
            yield f"{where}: pass_at_k is {row['pass_at_k']}"
        for name in ("pass_rate", "pass_at_k"):
            low, high = row[f"{name}_interval"]
            if not 0 <= low <= row[name] <= high <= 1:
                yield f"{where}: {name} is {row[name]}, and its interval {low} to {high}"


def _compute(row: Row, axis: str) -> float | None:
    """That of an evaluation on an axis."""
    spent = row["device_seconds"]
    return {
        "gpu_hours": (spent["generate"] + spent["train"] + spent["idle"]) / 3600,
        "flops": row["flops"]["generate"] + row["flops"]["train"],
        "tokens": row["tokens"]["generated"],
        "tokens_processed": row["tokens"]["generated"] + row["tokens"]["trained"],
        "samples": row["samples"],
        "steps": row["step"],
    }.get(axis)


def forecasts_are_of_this_run(record: Record) -> Iterator[str]:
    budget = record.config["budget"]
    ends = [*budget.get("before", ()), budget["amount"]]
    shares = record.config["recipe"]["evaluation"]["forecast_at"]
    made = [row["made_at_step"] for row in record.forecasts]
    if made != sorted(made) or len(made) > len(shares) * len(ends):
        yield f"forecasts.jsonl: made at the steps {made}, at the shares {shares} of the budget"
    due = due_steps(record)
    if (
        due is not None and len(ends) == 1
    ):  # after the step that reaches the share, from the evaluations until then
        reached = [math.ceil(Fraction(str(share)) * Fraction(budget["amount"])) for share in shares]
        last = Counter(max(step for step in due if step <= end) for end in reached)
        if strange := sorted((Counter(made) - last).elements()):
            yield f"forecasts.jsonl: made at the steps {strange}, where none is due, or twice"
    at = {row["step"]: row for row in record.evals}
    for row in record.forecasts:
        where, curve = f"the forecast of step {row['made_at_step']}", row["curve"]
        if row["made_at_step"] not in at:
            yield f"{where}: no evaluation of that step"
        elif not close(row["compute"], _compute(at[row["made_at_step"]], row["axis"]) or 0.0):
            yield f"{where}: made at {row['compute']} {row['axis']}, which its evaluation does not have"
        if row["axis"] != budget["kind"] or row["target_compute"] not in ends:
            yield f"{where}: of {row['target_compute']} {row['axis']}, which is not the budget"
        if not row["prediction"][0] <= row["median"] <= row["prediction"][1]:
            yield f"{where}: {row['median']}, and the interval {row['prediction']}"
        if len({len(curve[key]) for key in ("compute", "median", "lo", "hi")}) > 1:
            yield f"{where}: its curve has lists of several lengths"
        elif curve["compute"] != sorted(curve["compute"]) or curve["compute"][-1] != row["target_compute"]:
            yield f"{where}: its curve does not go up to the target"
        elif any(not a <= b <= c for a, b, c in zip(curve["lo"], curve["median"], curve["hi"], strict=True)):
            yield f"{where}: the median of its curve leaves the band"


def samples_are_of_this_run(record: Record) -> Iterator[str]:
    """Of evaluations and steps on record, in their order, of prompts that these had."""
    known = {
        "evaluation": {row["step"]: set(row["id"]) for row in record.prompts},
        "training": {row["step"]: set(row["prompt"]) for row in record.groups},
    }
    steps: dict[str, list[int]] = {source: [] for source in known}
    for number, row in enumerate(record.samples, 1):
        where, (first, last) = f"samples.jsonl:{number}", row["versions"]
        steps[row["source"]].append(row["step"])
        if row["prompt"] not in known[row["source"]].get(row["step"], ()) and not record.killed:
            yield f"{where}: no such prompt in the {row['source']} of step {row['step']}"
        if row["finish"] not in ("ended", "truncated", "interrupted") or row["length"] < 1:
            yield f"{where}: {row['finish']} after {row['length']} tokens"
        if row["source"] == "evaluation" and [first, last] != [row["step"]] * 2:
            yield f"{where}: sampled by the versions {row['versions']} in an evaluation of {row['step']}"
        if not 0 <= first <= last <= row["step"]:
            yield f"{where}: sampled by the versions {row['versions']} up to step {row['step']}"
    for source, found in steps.items():
        if found != sorted(found):
            yield f"samples.jsonl: of {source} the steps are {found}: not in order"


def timeline_is_possible(record: Record) -> Iterator[str]:
    for number, row in enumerate(record.timeline, 1):
        if "event" in row:
            missing = {"kind", "role", "who", "node", "time"} - set(row)
        else:
            whose = {"step"} if row.get("role") == "train" else {"who", "node"}
            missing = {"role", "began", "ended", "busy", *whose} - set(row)
            if not missing and not 0 <= row["busy"] <= row["ended"] - row["began"] + 1e-3:
                yield f"timeline.jsonl:{number}: busy for {row['busy']} s, {row['began']} to {row['ended']}"
        if missing:
            yield f"timeline.jsonl:{number}: without {', '.join(sorted(missing))}"
