"""A run as a chart and a page show it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalerl.record.reader import RunRecord
from scalerl.view.facts.notices import part_that_holds

if TYPE_CHECKING:
    from scalerl.curve import Fit, Points


@dataclass(frozen=True)
class OverlayRun:
    """One run of a chart. `record` is None for a table, and `reason` a sentence on why there is no `fit`."""

    name: str
    """The name that is shown, unique in its chart."""
    points: Points
    """All of its evaluations, on the axis of the fit."""
    record: RunRecord | None = None
    fit: Fit | None = None
    reason: str = ""
    budget: float = math.nan
    """Compute to which its curve is drawn, on the axis of the fit; NaN is the budget of the chart."""

    @functools.cached_property
    def part(self) -> Fit | None:
        """The fit of the part that holds, of a run that no curve describes as a whole."""
        return part_that_holds(self.fit) if self.fit is not None else None
