"""The folded sections of one run: its fit in full, health, roles, tasks, strata, compute, and recipe."""

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.errors import counted
from scalerl.numbers import as_mapping, percent, rate
from scalerl.record.downstream import SuiteResult, last_of_each
from scalerl.record.prompts import is_whole, successes_of, whole_rows
from scalerl.record.reader import PASS_RATE_OF, RunRecord
from scalerl.view.document import PagePart, PageSection
from scalerl.view.facts.facts import compute_rows, environment, recipe_sections, uncounted_rows
from scalerl.view.facts.fit_rows import fit_rows
from scalerl.view.facts.notices import WHO_CHECKS, alarm_table, health_text
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.gathered import MOST_PARTS, RunsView
from scalerl.view.runs.panels import always_zero, step_panels
from scalerl.view.runs.roles import in_flight_rows, ledger_rows, role_panels, role_rows
from scalerl.view.table import Cell, Estimate, Table, rate_cell, row

_CURVE = (
    "R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B). A, B and C_mid are posterior medians with their "
    "intervals: A’s averages the families of curves by their weights, those of B and C_mid are for the "
    "log-logistic curve. The least-squares curve is the paper’s estimate (arXiv 2510.13786); the intervals "
    "are not about it."
)


def run_sections(run: ShownRun, end: float) -> list[PageSection]:
    """Return the rows of `scalerl fit` for a run, with a forecast at `end`, and the rest of its folder."""
    fits = [PagePart(text=f"No fit: {run.reason}.")]
    if run.fit is not None:
        fits = [PagePart(rows=fit_rows(run.fit, [end]), note=_CURVE)]
    if run.fit is not None and run.part is not None:
        fits.append(PagePart("Fitted on the part that holds", rows=fit_rows(run.part, [end])))
    found, record = [PageSection("The fit", fits)], run.record
    if record is None:
        return found
    stratum = str(record.config.get("strata") or "stratum")
    recipe = [PagePart(title, rows=rows) for title, rows in recipe_sections(record.config.get("recipe"))]
    recipe = recipe or [PagePart(text="This run’s config.json holds no recipe.")]
    computes = (
        PagePart("Counted as training compute", rows=compute_rows(record)),
        PagePart("Recorded, and not counted", rows=uncounted_rows(record)),
    )
    by_stratum = PagePart(table=strata_table(record.eval_prompts(), stratum))
    settings = (*recipe, PagePart("environment", rows=environment(record.config)))
    return [
        *found,
        _health(record),
        PageSection(f"Pass rate by {stratum}", (by_stratum,)),
        PageSection("Completions", _completions(record)),
        PageSection("Compute", computes, columns=True),
        PageSection("Recipe and environment", settings, columns=True),
    ]


def _completions(run: RunRecord) -> list[PagePart]:
    """Return the kept completions of the newest and the oldest evaluation."""
    by_step: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in run.samples():
        if sample.get("source") == "evaluation":
            by_step[sample.get("step")].append(sample)
    steps, parts = list(by_step), []
    for step in dict.fromkeys((*steps[-1:], *steps[:1])):
        items = []
        for one in by_step[step]:
            about = f"reward {one.get('reward')}, {one.get('finish')}, {one.get('length')} tokens"
            shown = f"{one.get('prompt_text')} → {one.get('completion')}"
            items.append((f"{one.get('prompt')} ({about})", shown))
        parts.append(PagePart(f"Evaluation at step {step}", items=items))
    return parts


def _health(run: RunRecord) -> PageSection:
    steps, recipe = run.steps(), run.config.get("recipe")
    apart = run.config.get("placement") != "inline"
    alarms = alarm_table(run.alarms) if run.alarms else None
    checked = health_text(run) + ("." if run.health_is_watched else f"; {WHO_CHECKS}.")
    return PageSection(
        "Health of the training",
        (
            PagePart("Alarms and warnings", table=alarms, note="" if alarms else checked),
            PagePart(
                "Over the trainer steps",
                panels=step_panels(steps, run.alarms, as_mapping(recipe).get("health")),
                note=_health_note(steps),
            ),
            PagePart("Updates in flight", rows=in_flight_rows(steps, recipe)),
            PagePart("What became of every prompt that was admitted", rows=ledger_rows(steps, run.lost())),
            PagePart(
                "Generators and trainer over time",
                rows=role_rows(steps, apart),
                panels=step_panels(steps, panels=role_panels(apart)),
            ),
        ),
    )


def _health_note(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return "This run holds no steps.jsonl, so there are no health figures."
    skipped, zero = sum(bool(step.get("skipped")) for step in steps), always_zero(steps)
    text = f"{counted(len(steps), 'trainer step')}. Bold: running mean. "
    text += f"{counted(skipped, 'step')} without a usable group skipped. " if skipped else ""
    text += f"Zero at every step, and not drawn: {', '.join(zero)}. " if zero else ""
    return (
        f"{text}Shaded: steps of alarms, and more lightly of warnings. Dotted and dashed: the thresholds of "
        "warnings and alarms, where the values come near them. Truncation of 10–15 % went with runs that "
        "broke in the paper (arXiv 2510.13786); entropy did not predict quality there."
    )


def strata_table(evaluations: Sequence[Mapping[str, Any]], label: str = "stratum") -> Table | None:
    """Return pass rates by stratum of the held-out prompts, in the first and last line of eval_prompts.jsonl.

    The stratum of a prompt is its id up to the last slash: `chain/7/123` belongs to `chain/7`. None if there
    are fewer than two strata, or fewer than two evaluations, or they have different prompts.
    """
    evaluations = [line for line in evaluations if is_whole(line)]
    if len(evaluations) < 2 or evaluations[0]["prompt_set"] != evaluations[-1]["prompt_set"]:
        return None
    start, end = _rates(evaluations[0]), _rates(evaluations[-1])
    names = sorted(start.keys() & end.keys(), key=_natural)
    if len(names) < 2:
        return None
    first, last = (f"at step {evaluations[place]['step']}" for place in (0, -1))
    rows = []
    for name in names:
        means = [sum(rates[name]) / len(rates[name]) for rates in (start, end)]
        rows.append(row(name, str(len(end[name])), *map(rate, means)))
    headers = (label, "prompts", first, last)
    return Table("strata", f"Pass rate by {label}", headers, tuple(rows), "Held-out prompts.", (label,))


def _rates(line: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the pass rates of the prompts of every stratum."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, correct in zip(line["id"], line["correct"], strict=True):
        stratum, slash, _ = str(name).rpartition("/")
        if slash:
            found[stratum].append(correct / line["n"])
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `chain/10` after `chain/9`."""
    parts = re.findall(r"\d+|\D+", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def task_table(view: RunsView) -> Table | None:
    """Return a row for each task and each suite of a single run; None if there are none."""
    run = view.runs[0].record if len(view.runs) == 1 else None
    if run is None or run.task:
        return None
    newest = deque(whole_rows(run, 0) if run.tasks else (), maxlen=1)
    found = [
        SuiteResult.of(name, last["step"], correct_P, last["n"])
        for last, name in itertools.product(newest, run.tasks)
        if len(correct_P := successes_of(last, name))
    ]
    found += last_of_each(run.downstream()).values()
    if not found:
        return None
    headers = ("task or suite", "prompts", "samples", "at step", "pass@1", "pass@k", "ceiling A")
    rows = []
    for one in found:
        counts = map(str, (one.n_prompts, one.n_samples, one.step))
        first = rate_cell(Estimate(one.pass_rate, one.pass_rate_interval))
        best = rate_cell(Estimate(one.pass_at_k, one.pass_at_k_interval))
        rows.append(row(one.suite, *counts, first, best, _ceiling(view.parts.get(one.suite))))
    note = (
        "The last evaluation of each, with 95 % intervals over prompts such as these; k is the number of "
        f"samples. Ceiling: of a curve of its own, with the {percent(view.level)} interval, where it is "
        f"identified. `scalerl fit RUN --y {PASS_RATE_OF}NAME` prints it."
    )
    if len(found) > MOST_PARTS:
        note += f" Only the first {MOST_PARTS} are fitted here."
    return Table("tasks", "Pass rate by task and suite", headers, tuple(rows), note, headers[:1])


def _ceiling(part: ShownRun | None) -> Cell:
    fit = part.fit if part is not None else None
    if fit is None:
        return rate_cell(None, "too few evaluations") if part is not None else rate_cell(None)
    return rate_cell(Estimate(fit.median.A, fit.intervals.A) if fit.identified else None, "not identified")
