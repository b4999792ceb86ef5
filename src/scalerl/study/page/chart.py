"""The arms of a study as groups of runs, for the chart of a page and for its figures."""

from __future__ import annotations

from typing import Any

from scalerl.curve import Points
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.view.runs.groups import RunGroup
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.run import OverlayRun


def arm_groups(verdict: StudyVerdict) -> list[RunGroup]:
    """Return the arms that have evaluations, with their mean curves over seeds; the base comes first.

    Without a fit the evaluations of a run are shown all the same: a run that failed is part of the arm.
    """
    found = []
    for arm in verdict.arms:
        runs = []
        for one in arm.runs:
            record = one.run.record
            if record is not None and record.evals and verdict.axis in record.logged_axes():
                points = Points.from_record(record, verdict.axis, verdict.study.plan["price"])
            elif one.fit is not None:  # in dollars, which no record has without a price
                points = one.fit.points
            else:
                continue
            name = f"{arm.name} seed {one.run.plan.seed}"
            runs.append(OverlayRun(name, points, record, one.fit, one.why, verdict.budget))
        # A band around a curve that does not describe the runs would lend it a precision that it has not.
        draws = None if any(fit.misfit for fit in arm.fits) or len(runs) < 2 else arm.draws
        if runs:
            found.append(RunGroup(arm.name, tuple(runs), draws))
    return sorted(found, key=lambda group: group.name != verdict.study.plan["base"])


def study_chart(verdict: StudyVerdict) -> dict[str, Any] | None:
    """Return the data of the chart, arms being groups (`scalerl.view.runs.overlay`); None without a run."""
    groups = arm_groups(verdict)
    runs = [run for group in groups for run in group.runs]
    target = verdict.study.plan.get("target")
    return overlay(runs, budget=verdict.budget, target=target, groups=groups) if runs else None
