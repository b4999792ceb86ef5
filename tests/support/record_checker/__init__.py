"""Whether a run folder is what docs/reference/run-folder.md says: written from that page alone, plain Python.

    cd tests/support; python -m record_checker RUN ...      prints the faults; status 1 where there are any

Nothing of scalerl is imported, so that the checker cannot agree with the code by sharing its mistakes. What
the page leaves open is not checked: a rule is said on the page first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from record_checker import counters, evaluations, groups, losses, steps
from record_checker.form import Record

Rule = Callable[[Record], Iterator[str]]
RULES: tuple[Rule, ...] = (
    steps.each_step_once,
    steps.pairs_of_files_agree,
    steps.evaluations_are_where_they_belong,
    steps.values_are_possible,
    steps.ages_are_within_the_schedule,
    steps.config_agrees,
    groups.groups_agree_with_steps,
    groups.what_was_used,
    groups.each_draw_once_and_in_order,
    groups.ledger_balances,
    counters.counters_never_fall,
    counters.consumed_is_what_steps_consumed,
    counters.tokens_are_made_before_they_are_used,
    counters.devices_are_held,
    counters.weights_are_those_of_one_model,
    evaluations.evaluations_agree_with_prompts,
    evaluations.suites_agree_with_evaluations,
    evaluations.forecasts_are_of_this_run,
    evaluations.samples_are_of_this_run,
    evaluations.timeline_is_possible,
    losses.costs_are_those_of_the_lines,
)


def check(folder: Path | str, killed: bool = False) -> list[str]:
    """Return the faults of a run folder, each a line that says where; none where the record is sound.

    `killed`: the run was killed and has not been resumed yet.
    """
    record = Record(Path(folder), killed)
    return record.faults or [fault for rule in RULES for fault in _found(rule, record)]


def _found(rule: Rule, record: Record) -> Iterator[str]:
    try:
        yield from rule(record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        yield f"{rule.__name__}: a value is not of the kind that the page says ({error!r})"
