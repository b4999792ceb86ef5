"""Rules of lost.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from record_checker.form import FILES, Record, Row, parsed

COSTS = ("device_seconds", "flops", "tokens")
RECORDED = ("steps.jsonl", "groups.jsonl", "evals.jsonl", "eval_prompts.jsonl", "forecasts.jsonl")
RECORDED += ("downstream.jsonl", "alarms.jsonl", "samples.jsonl", "timeline.jsonl")
TIMED = ("steps.jsonl", "evals.jsonl")
"""Files whose lines have the time, so that two of them are never the same text."""


@dataclass
class Cut:
    """What one resume has cut: the line with its cost, and the lines of each file."""

    head: Row
    lines: dict[str, list[str]] = field(default_factory=dict)

    def rows(self, name: str) -> list[Row]:
        """The whole lines of a file."""
        return [row for row in map(parsed, self.lines.get(name, [])) if row is not None]


def costs_are_those_of_the_lines(record: Record) -> Iterator[str]:
    """Each cut beside its own lines, and those of the record as it is now."""
    cuts: list[Cut] = []
    for number, row in enumerate(record.lost, 1):
        if set(row) == {"resumed", "lost", "cut"}:
            cuts.append(Cut(row))
        elif set(row) != {"file", "line"} or row["file"] not in RECORDED:
            yield f"lost.jsonl:{number}: neither the cost of a cut nor a line of the record"
        elif not cuts:
            yield f"lost.jsonl:{number}: a line before the cost of its cut"
        else:
            cuts[-1].lines.setdefault(row["file"], []).append(row["line"])
    for number, cut in enumerate(cuts):
        where = f"lost.jsonl, cut {number + 1}"
        for fault in [*_form(cut), *_order(cut), *_cost(cut, cuts[number + 1 :], record.steps)]:
            yield f"{where}: {fault}"
    yield from _twice(cuts)


def _form(cut: Cut) -> Iterator[str]:
    if not any(cut.lines.values()):
        yield "no line was cut"
    for name, lines in cut.lines.items():
        if any(parsed(line) is None for line in lines[:-1]):
            yield f"a line of {name} that is not its last is unfinished"


def _order(cut: Cut) -> Iterator[str]:
    """The steps are the end of a file; groups and prompts are written before what they belong to."""
    steps, groups, evals, prompts = ([row["step"] for row in cut.rows(name)] for name in FILES)
    if steps != list(range(steps[0], steps[0] + len(steps)) if steps else []):
        yield f"the steps {steps} are no end of steps.jsonl"
    if groups[: len(steps)] != steps or len(groups) > len(steps) + 1:
        yield f"lines of the steps {steps}, and of the groups of {groups}"
    if prompts[: len(evals)] != evals or len(prompts) > len(evals) + 1 or prompts != sorted(set(prompts)):
        yield f"lines of the evaluations {evals}, and of the prompts of {prompts}"


def _cost(cut: Cut, later: list[Cut], steps: list[Row]) -> Iterator[str]:
    """What `lost` says is the last step that was cut less the last that was kept."""
    rows, lost = cut.rows("steps.jsonl"), cut.head["lost"]
    expected: dict[str, float] = {"steps": len(rows)}
    if rows:
        kept = _kept(rows[0]["step"] - 1, later, steps)
        if kept is None:
            yield f"step {rows[0]['step'] - 1}, the last that was kept, is nowhere"
            return
        before, after = _counters(kept), _counters(rows[-1])
        expected |= {name: value - before.get(name, 0.0) for name, value in after.items()}
    found = {"steps": lost.get("steps"), **_counters(lost)}
    for name in sorted(set(found) | set(expected)):
        one, other = found.get(name), expected.get(name, 0.0)
        if one is None and (name == "steps" or rows):
            yield f"lost has no {name}"
        elif one is not None and not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6):
            yield f"lost.{name} is {one:.9g}, and the lines that were cut make it {other:.9g}"


def _kept(step: int, later: list[Cut], steps: list[Row]) -> Row | None:
    """The line of a step as it was at a cut: a later cut may have taken it, otherwise it is on record."""
    if step == 0:
        return {}
    for cut in later:
        for row in cut.rows("steps.jsonl"):
            if row["step"] == step:
                return row
    return next((row for row in steps if row["step"] == step), None)


def _twice(cuts: list[Cut]) -> Iterator[str]:
    """Each line was run, and cut, once."""
    seen: dict[tuple[str, str], int] = {}
    for number, cut in enumerate(cuts, 1):
        for name in TIMED:
            twice = 0
            for line in cut.lines.get(name, []):
                twice += (name, line) in seen
                seen.setdefault((name, line), number)
            if twice:
                yield f"lost.jsonl, cut {number}: {twice} lines of {name} have been recorded before"


def _counters(row: Row) -> dict[str, float]:
    return {f"{name}.{key}": value for name in COSTS for key, value in row.get(name, {}).items()}
