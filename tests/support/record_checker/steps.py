"""Rules of steps.jsonl, the places of evaluations, and config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from record_checker.form import Record, close, flat, short

STALENESS_KEYS = ("staleness_mean", "staleness_max", "staleness_histogram", "staleness_share_over_4")
SHARES = (
    *("correct", "zero_variance", "truncated", "interrupted", "multi_version", "ratio_clipped", "ess"),
    *("staleness_share_over_4", "failed", "pass_rate"),
)
ORDERED = (("ratio_mean", "ratio_max"), ("staleness_mean", "staleness_max"), ("logp_gap", "logp_gap_max"))


def each_step_once(record: Record) -> Iterator[str]:
    found = [row["step"] for row in record.steps]
    if found != list(range(1, len(found) + 1)):
        yield f"steps.jsonl: the steps are {short(found)}, not 1 to {len(found)}, each once"
    for row in record.steps:
        if row["version"] != row["step"]:
            yield f"step {row['step']}: its version is {row['version']}"
        if row["skipped"] != (row["groups_used"] == 0):
            yield f"step {row['step']}: skipped is {row['skipped']} with {row['groups_used']} groups used"
        if missing := [key for key in STALENESS_KEYS if (key in row) == row["skipped"]]:
            yield f"step {row['step']}: {', '.join(missing)} where skipped is {row['skipped']}"


def pairs_of_files_agree(record: Record) -> Iterator[str]:
    """Each step has a line in both of its files, each evaluation in both of its own; written last in the
    first."""
    for one, other, names in (
        (record.steps, record.groups, "steps.jsonl and groups.jsonl"),
        (record.evals, record.prompts, "evals.jsonl and eval_prompts.jsonl"),
    ):
        first, second = ([row["step"] for row in rows] for rows in (one, other))
        if second[: len(first)] != first or len(second) > len(first) + record.killed:
            yield f"{names} have other steps: {short(first)} and {short(second)}"


def evaluations_are_where_they_belong(record: Record) -> Iterator[str]:
    """At step 0, and with a budget of steps at the first step of each part of it."""
    found = [row["step"] for row in record.evals]
    if found != sorted(set(found)):
        yield f"evals.jsonl: the steps are {short(found)}: not in order, or one twice"
    if found and found[-1] > len(record.steps):
        yield f"evals.jsonl: an evaluation of step {found[-1]}, and {len(record.steps)} steps"
    yield from _due(record, found)


def _due(record: Record, found: list[int]) -> Iterator[str]:
    last, done = len(record.steps), (record.folder / "checkpoints" / "final").is_dir()
    dry = bool(record.steps) and record.steps[-1]["pool"] == 0
    due = due_steps(record)
    if due is None:
        if done and (not found or found[0] != 0 or found[-1] != last):
            yield f"evals.jsonl: evaluations of {short(found)}, not of the first and the last of all steps"
        return
    if done and last != due[-1] and not (dry and last < due[-1]):
        yield f"checkpoints/final is there after {last} of {due[-1]} steps"
    if done and dry:
        due = sorted({step for step in due if step <= last} | {last})
    # Where a run came to the end of a budget, and a resume has raised that.
    former = {math.ceil(Fraction(amount)) for amount in record.config["budget"].get("before", ())}
    extra = former - set(due)
    found = [step for step in found if step not in extra]
    if found != (due if done else due[: len(found)]):
        yield f"evals.jsonl: evaluations of the steps {short(found)}, where {short(due)} are due"


def due_steps(record: Record) -> list[int] | None:
    """The steps after which an evaluation is due, of a budget that is a number of steps."""
    budget, evaluation = record.config["recipe"]["budget"], record.config["recipe"]["evaluation"]
    if budget["kind"] != "steps":
        return None
    last = math.ceil(Fraction(budget["amount"]))
    first = Fraction(record.config["budget"].get("before", [budget["amount"]])[0])
    # Of a run of an older version `every` is not there.
    apart = Fraction(evaluation.get("every") or first / evaluation["count"])
    return sorted({0, last} | {math.ceil(apart * i) for i in range(1, math.floor(last / apart) + 1)})


def values_are_possible(record: Record) -> Iterator[str]:
    rows = [(f"step {row['step']}", row) for row in record.steps]
    rows += [(f"evaluation {row['step']}", row) for row in record.evals]
    for where, row in rows:
        for name in SHARES:
            value = row.get(name)
            if isinstance(value, float | int) and not 0 <= value <= 1 + 1e-9:
                yield f"{where}: {name} is {value}, which is no share"
        for name, value in flat(row, ("grad_norm", "lr", "mean_length", "entropy", "pool", "queue")).items():
            if value < -1e-9:
                yield f"{where}: {name} is {value}"
        for least, most in ORDERED:
            one, other = row.get(least), row.get(most)
            if one is not None and other is not None and one > other * (1 + 1e-6) + 1e-9:
                yield f"{where}: {least} is {one}, and {most} {other}"


def ages_are_within_the_schedule(record: Record) -> Iterator[str]:
    schedule = record.config["recipe"]["schedule"]
    most = schedule["k"] - (schedule["kind"] == "off_policy")
    for row in record.steps:
        if not 0 <= row["kv_staleness_max"] <= most:
            found = f"a KV cache entry of staleness {row['kv_staleness_max']}"
            yield f"step {row['step']}: {found}, and {most} is the bound"
        if row["skipped"]:
            continue
        where, share = f"step {row['step']}", row["staleness_histogram"]
        if row["staleness_max"] > row["kv_staleness_max"]:
            found = f"tokens of staleness {row['staleness_max']}"
            yield f"{where}: {found}, and a KV cache of {row['kv_staleness_max']}"
        if not close(sum(share), 1, 1e-6) or len(share) != row["staleness_max"] + 1 or share[-1] <= 0:
            yield f"{where}: shares {share}, and staleness_max {row['staleness_max']}"
        if not close(sum(lag * part for lag, part in enumerate(share)), row["staleness_mean"], 1e-6):
            yield f"{where}: staleness_mean is {row['staleness_mean']}, shares {share}"
        if not close(sum(share[5:]), row["staleness_share_over_4"], 1e-6):
            yield f"{where}: staleness_share_over_4 is {row['staleness_share_over_4']}, shares {share}"


def config_agrees(record: Record) -> Iterator[str]:
    config = record.config
    if config["seed"] != config["recipe"]["seed"]:
        yield f"config.json: seed {config['seed']}, and {config['recipe']['seed']} in its recipe"
    if config["recipe"]["task"].get("kind") == "code" and not config.get("sandbox", {}).get("sandbox"):
        yield "config.json: a task of code, and no sandbox that ran it"
    trainers = config["devices"].get("trainers")
    if not isinstance(trainers, int) or trainers < 1:
        yield f"config.json: {trainers} trainers"
    saved = sorted(path.name for path in (record.folder / "checkpoints").glob("step-*"))
    newest = max((int(name.split("-")[1].split(".")[0]) for name in saved), default=0)
    if newest > len(record.steps):
        yield f"checkpoints/{saved[-1]}, and {len(record.steps)} steps on record"
    keep = config["recipe"]["checkpoint"]["keep"]
    if len(saved) > keep and not record.killed:
        yield f"checkpoints: {', '.join(saved)}, and the recipe keeps {keep}"
