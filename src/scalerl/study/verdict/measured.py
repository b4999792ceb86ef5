"""Pass rates as they were measured, without a curve: at parts of the budget, seed by seed.

Shapes: S seeds, M computes.
"""

import math
from collections.abc import Sequence

import numpy as np

from scalerl.study.verdict.differences import models_of, rates_at, standard_error
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.view.numbers import DASH, rate, signed, unit_for
from scalerl.view.table import Cell, Row, Table, row

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)


def measured_table(verdict: StudyVerdict) -> Table:
    """Return a row for every arm: its mean pass rate at parts of the budget, less that of the base.

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
