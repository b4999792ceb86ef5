"""Tables of a study's design: effects of switches, and the best batch by budget."""

from __future__ import annotations

import math

from scalerl.forecast.comparison import Difference
from scalerl.forecast.effect_tables import Effect, Effects, OnParameter
from scalerl.forecast.splits.table import Allocation, Best
from scalerl.view.numbers import p_value, rate, rate_interval, unit_for
from scalerl.view.table import Cell, Column, Row, Table, difference_cell, share, spread_keys, words

_TITLES = {"A": "ceiling A", "log_C_mid": "C_mid"}


def effects_table(effects: Effects) -> Table:
    """One row for every effect on A and on C_mid."""
    columns = (
        Column("effect of", ("effect",), prose=True),
        Column("on", ("on",), prose=True),
        Column("on less off", spread_keys("difference")),
        Column("p", ("p",)),
        Column("adjusted", ("p_adjusted",)),
        Column("verdict", ("verdict",), prose=True),
    )
    rows = [_effect_row(on, effect) for on in effects.on for effect in on.effects]
    note = (
        "An effect is the mean over the settings of all other switches; a x b is half of what a does with b "
        "on less what it does with b off. What is joined by + cannot be told apart. C_mid is a ratio. p is "
        "corrected (Holm) over all effects, apart from the verdicts on arms, which are corrected among "
        "themselves. " + " ".join(f"{text[0].upper()}{text[1:]}." for text in effects.cautions)
    )
    return Table("effects", "Effects of the switches", columns, tuple(rows), note.strip())


def _effect_row(on: OnParameter, effect: Effect) -> Row:
    low, high = effect.interval
    values, kind = (effect.median, low, high), "difference"
    if on.parameter != "A":
        values, kind = tuple(math.exp(value) for value in values), "ratio"
    difference = Difference(kind, math.nan, math.nan, values[0], values[1:], values[1:])  # pyright: ignore
    told = effect.verdict not in ("not distinguishable", "no claim")
    cells = (
        words(effect.name),
        words(_TITLES[on.parameter]),
        difference_cell(difference),
        share(effect.p, p_value(effect.p)),
        share(effect.p_adjusted, p_value(effect.p_adjusted)),
        words(effect.verdict),
    )
    return Row(cells, "moved" if told else "")


def allocation_table(allocation: Allocation, axis: str) -> Table:
    """One row for every budget: the best batch, the steps that it leaves, and the pass rate there."""
    unit = unit_for(axis, allocation.budgets[-1].budget)
    columns = (
        Column(f"budget ({unit.name})", ("budget",)),
        Column("best prompts per batch", spread_keys("prompts"), prose=True),
        Column("best completions per prompt", spread_keys("samples"), prose=True),
        Column("steps", spread_keys("steps")),
        Column("pass rate", spread_keys("pass_rate")),
        Column("the best of the grid is among", ("cells",), prose=True),
    )
    rows = []
    for at in allocation.budgets:
        median_rate, rates = at.pass_rate
        median_steps, steps = at.steps
        among = ", ".join(f"{prompts} x {samples}" for prompts, samples in at.cells)
        rows.append(
            Row(
                (
                    share(at.budget, f"{at.budget / unit.size:,.3g}"),
                    _best_cell(at.prompts),
                    _best_cell(at.samples),
                    Cell(
                        f"{median_steps:,.0f}", (median_steps, *steps), f"[{steps[0]:,.0f}, {steps[1]:,.0f}]"
                    ),
                    Cell(rate(median_rate), (median_rate, *rates), rate_interval(rates)),
                    words(among),
                )
            )
        )
    said = [f"{text[0].upper()}{text[1:]}." for text in (*map(str, allocation.growth), *allocation.cautions)]
    return Table("allocation", "The best batch", columns, tuple(rows), " ".join(said))


def _best_cell(best: Best | None) -> Cell:
    if best is None:
        return Cell("as in all runs", (None, None, None))
    return Cell(str(best), (best.median, *best.interval))
