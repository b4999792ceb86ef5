"""The answer of a study as text: for every arm its measured difference, its ceiling and its efficiency.

The table has measured pass rates, without a curve. Shapes: S seeds, M computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.forecast.measured import standard_error
from scalerl.numbers import DASH, rate, signed, unit_for
from scalerl.study.verdict.arm_fits import ArmSummary, last_gains
from scalerl.study.verdict.differences import models_of, rates_at
from scalerl.study.verdict.verdict import BY_CURVES, StudyVerdict
from scalerl.view.facts.notices import pair_text, question_text
from scalerl.view.table import Cell, Row, Table, rate_cell, row


@dataclass(frozen=True)
class Answer:
    """The verdict on one arm; `text` follows the arm's name."""

    arm: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.arm}: {self.text}"


def answers(verdict: StudyVerdict) -> list[Answer]:
    """Return one answer for every arm, in the order of the plan."""
    return [_answer(verdict, arm) for arm in verdict.arms]


def budget_text(verdict: StudyVerdict) -> str:
    """Return the compute at which pass rates are compared, with its unit."""
    return unit_for(verdict.axis, verdict.budget).show(verdict.budget)


def _answer(verdict: StudyVerdict, arm: ArmSummary) -> Answer:
    kind, pair = verdict.kind(arm.name), verdict.pairs.get(arm.name)
    if kind == "the base":
        return Answer(arm.name, kind, _base_text(verdict, arm))
    if kind == "never acted":
        return Answer(
            arm.name,
            kind,
            "the runs of the base, evaluation for evaluation and step for step: what it changes never acted.",
        )
    if why := verdict.still.get(arm.name):
        return Answer(arm.name, kind, f"{why}: the study says nothing of the arm.")
    measured = _measured(verdict, arm)
    if pair is None:
        why = verdict.not_compared.get(arm.name, "no comparison was made")
        return Answer(arm.name, kind, f"not compared: {why}{measured and f'; {measured}'}.")
    return Answer(arm.name, kind, pair_text(pair, measured, by_curves=kind in BY_CURVES))


def _measured(verdict: StudyVerdict, arm: ArmSummary) -> str:
    """Return the difference measured at the budget, else that of the last evaluations; empty if unknown."""
    if found := verdict.measured.get(arm.name):
        return question_text(f"measured at {budget_text(verdict)}", found.difference, found.claim)
    gain = last_gains(verdict.study).get(arm.name)
    return "" if gain is None else f"its last pass rate was {signed(gain)} from that of the base"


def _base_text(verdict: StudyVerdict, arm: ArmSummary) -> str:
    if why := verdict.still.get(arm.name):  # its ceiling would be only the prior's
        return f"what the others are compared with: {why}."
    found = [
        f"{label} {rate_cell(arm.quantities[key]).whole}"
        for key, label in (("A", "ceiling A"), ("pass_rate", f"pass rate at {budget_text(verdict)}"))
        if key in arm.quantities
    ]
    why = verdict.not_compared.get(arm.name)
    found += [why] if why else []
    return "what the others are compared with" + (f": {', '.join(found)}." if found else ".")


SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)


def measured_table(verdict: StudyVerdict) -> Table:
    """Return a row for every arm: its mean pass rate at parts of the budget, minus that of the base.

    Between evaluations the pass rate is interpolated linearly in compute.
    """
    compute_M = np.array(SHARES) * verdict.budget
    unit = unit_for(verdict.axis, verdict.budget)
    rates = {arm.name: rates_at(arm, verdict.axis, compute_M) for arm in verdict.arms}
    base = str(verdict.study.plan["base"])
    headers = ("arm", "common seeds", *(f"at {unit.show(compute)}" for compute in compute_M.tolist()))
    models = {arm.name: models_of(arm) for arm in verdict.arms}
    rows = [
        _row(name, of_arm, rates[base], models[name], name == base)
        for name, of_arm in rates.items()
        if of_arm
    ]
    note = (
        "The base: mean pass rate over seeds. The others: mean difference to it over the seeds that both "
        "have, and its standard error, in which seeds of one base model count as one "
        "where there are several. No curve is fitted."
    )
    return Table("measured", "Pass rates as measured", headers, tuple(rows), note, ("arm",))


def _row(
    name: str, own: dict[int, np.ndarray], base: dict[int, np.ndarray], models: dict[int, str], is_base: bool
) -> Row:
    seeds = [seed for seed in own if seed in base]
    value_SM = np.array([own[seed] - (0.0 if is_base else base[seed]) for seed in seeds])
    cells: list[Cell | str] = [name, str(len(seeds))]
    for m in range(len(SHARES)):
        known = [s for s in range(len(seeds)) if not math.isnan(value_SM[s, m])]
        cells.append(
            _cell(value_SM[known, m] if known else np.empty(0), [models[seeds[s]] for s in known], is_base)
        )
    return row(*cells, mark="base" if is_base else "")


def _cell(value_S: np.ndarray, models: Sequence[str], is_base: bool) -> Cell:
    if not len(value_S):
        return Cell(DASH)
    mean, se = float(value_S.mean()), standard_error(value_S, models)
    return Cell(rate(mean) if is_base else signed(mean), f"± {rate(se)}" if math.isfinite(se) else "")
