"""Rules of the cumulative counters."""

from __future__ import annotations

from collections.abc import Iterator

from record_checker.form import Record, Row, close, flat, is_whole

ROLES = ("generate", "train", "evaluate", "idle", "startup")


def _counters(row: Row, is_eval: bool) -> dict[str, float]:
    found = flat(row, ("device_seconds", "flops", "tokens"))
    if is_eval:
        return found | flat(row, ("samples", "prompts"))
    found |= flat(row, ("restarted", "wall_seconds", "idle_seconds"))
    return found | {f"ledger.{k}": n for k, n in row["ledger"].items() if k != "in_flight"}


def counters_never_fall(record: Record) -> Iterator[str]:
    """Within each file, and across both: those of an evaluation lie between its step and the next.

    `evaluate` apart, in which an evaluation has its own and those before it, and a step only those that had
    ended by then.
    """
    lines = [(row["step"], False, row) for row in record.steps] + [(e["step"], True, e) for e in record.evals]
    highest: dict[str, float] = {}
    evaluated = 0.0
    for step, is_eval, row in sorted(lines, key=lambda line: line[:2]):
        where, counters = f"{'evaluation' if is_eval else 'step'} {step}", _counters(row, is_eval)
        if gone := [role for role in ROLES if f"device_seconds.{role}" not in counters]:
            yield f"{where}: device_seconds without {', '.join(gone)}"
            continue
        if is_eval:
            own = counters.pop("device_seconds.evaluate")
            yield from _fall(
                where, "evaluate", max(evaluated, highest.get("device_seconds.evaluate", 0.0)), own
            )
            evaluated = max(evaluated, own)
        for name, value in counters.items():
            yield from _fall(where, name, highest.get(name, 0.0), value)
            highest[name] = max(highest.get(name, 0.0), value)


def _fall(where: str, name: str, before: float, value: float) -> Iterator[str]:
    if value < before and not close(value, before):
        yield f"{where}: {name} falls from {before:.9g} to {value:.9g}, by {before - value:.3g}"


def consumed_is_what_steps_consumed(record: Record) -> Iterator[str]:
    groups, completions = [0], [0]
    for row in record.steps:
        groups.append(groups[-1] + row["groups"])
        completions.append(completions[-1] + row["completions"])
    for row in record.evals:
        expected = [rows[min(row["step"], len(rows) - 1)] for rows in (completions, groups)]
        if [row["samples"], row["prompts"]] != expected:
            found = row["samples"], row["prompts"]
            yield f"evaluation {row['step']}: {found} samples and prompts, and the steps consumed {expected}"


def tokens_are_made_before_they_are_used(record: Record) -> Iterator[str]:
    """All sampled tokens of what was consumed were generated, and no more than those were trained on."""
    sampled = trained = 0.0
    for row in record.steps:
        here = row["mean_length"] * row["completions"]
        sampled += here
        if not is_whole(here):
            yield f"step {row['step']}: {row['completions']} completions of {row['mean_length']} tokens"
        if row["tokens"]["generated"] < sampled * (1 - 1e-9):
            yield f"step {row['step']}: {sampled:.0f} tokens consumed, {row['tokens']['generated']} generated"
        if row["tokens"]["trained"] - trained > here * (1 + 1e-9):
            yield f"step {row['step']}: {row['tokens']['trained'] - trained} tokens trained, of {here:.0f}"
        trained = row["tokens"]["trained"]


def weights_are_those_of_one_model(record: Record) -> Iterator[str]:
    """Every version has as many bytes; where none was sent nothing is spent on it."""
    sizes = {row["weight_sync"]["bytes"] for row in record.steps} - {0}
    if len(sizes) > 1:
        yield f"steps.jsonl: weights of {sorted(sizes)} bytes, and there is one model"
    for row in record.steps:
        sync = row["weight_sync"]
        if (sync["bytes"] == 0) != (sync["seconds"] == 0) or min(sync["bytes"], sync["seconds"]) < 0:
            yield f"step {row['step']}: {sync['bytes']} bytes of weights in {sync['seconds']} s"
        if sync["update_seconds"] is not None and sync["update_seconds"] < 0:
            yield f"step {row['step']}: weights were updated before they were sent"


def devices_are_held(record: Record) -> Iterator[str]:
    """Generate + train + idle is what the devices were held for.

    The devices that train may change on a resume: those of config.json are those of the last step. Of a
    device that is shared they have a part, of which there are at most eight."""
    turns = record.config["placement"] == "inline"
    before: dict[str, float] = {"held": 0.0, "wall": 0.0, "used": 0.0}
    devices = record.config["devices"]
    trainers = devices.get("held", {}).get("train", devices["trainers"])
    for row in record.steps:
        spent, idle = row["device_seconds"], row["idle_seconds"]
        held = spent["generate"] + spent["train"] + spent["idle"] - idle.get("apart", 0.0)
        if not turns:  # less the wall time of the generators
            held -= spent["generate"] + idle["generate"]
        now = {"held": held, "wall": row["wall_seconds"], "used": spent["train"] + idle["train"]}
        grown = {name: now[name] - before[name] for name in now}
        n = round(840 * grown["held"] / grown["wall"]) / 840 if grown["wall"] > 0 else 0
        said = f"step {row['step']}: in {grown['wall']:.6f} s trainers were held for {grown['held']:.6f} s"
        if n <= 0 or abs(grown["held"] - n * grown["wall"]) > 1e-6:
            yield said
        elif grown["used"] > n * grown["wall"] + 1e-6:
            yield f"{said}, and worked and waited for {grown['used']:.6f} s"
        elif row is record.steps[-1] and not close(n, trainers) and not record.killed:
            yield f"{said}, and config.json has {trainers}"
        before = now
