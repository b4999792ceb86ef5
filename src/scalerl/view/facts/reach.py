"""How far an amount of compute lies beyond the data, in words: it may have been meant in another unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from scalerl.record.reader import unit_of

if TYPE_CHECKING:
    from scalerl.curve.points import Points
    from scalerl.record.reader import RunRecord

FAR = 10.0
"""Times the largest compute of the data beyond which a warning names the axis."""


def beyond(amounts: Iterable[float], runs: Sequence[tuple[Points, RunRecord | None]]) -> str:
    """Return one warning for all amounts more than `FAR` times the compute of runs; empty without any.

    `runs` are points on one axis, in whose unit the amounts are, and their records (a table has none). Where
    the largest amount fits another axis of theirs, the warning names that.
    """
    axis = runs[0][0].axis
    reach = max(float(points.compute_N.max(initial=0.0)) for points, _ in runs)
    far = sorted({amount for amount in amounts if FAR * reach < amount < math.inf})
    if not far or reach <= 0:
        return ""
    named = " and ".join(dict.fromkeys(f"{amount:.10g}" for amount in (far[0], far[-1])))
    times = f"{'is' if len(far) == 1 else 'are up to'} {far[-1] / reach:,.3g} times beyond"
    unit = unit_of(axis)
    return f"{named} {unit} {times} the data, which reach {reach:.4g} {unit}{_meant(far[-1], axis, runs)}"


def _meant(amount: float, axis: str, runs: Sequence[tuple[Points, RunRecord | None]]) -> str:
    """Return the axis that an amount is nearest to, if it is within `FAR` times of its data; else nothing."""
    reached: dict[str, float] = {}
    for points, record in runs:
        if record is not None:
            own = {one: float(record.training_compute(one).max(initial=0.0)) for one in record.logged_axes()}
        else:
            own = {"steps": 0.0 if points.step_N is None else float(points.step_N.max(initial=0.0))}
        reached |= {name: max(reached.get(name, 0.0), end) for name, end in own.items()}
    near = {
        name: abs(math.log(amount / end))
        for name, end in reached.items()
        if name != axis and 1 / FAR <= amount / max(end, 1e-300) <= FAR
    }
    if not near:
        return ""
    name = min(near, key=lambda one: near[one])
    return f"; if it was meant in {unit_of(name)}, of which they reach {reached[name]:.4g}: --x {name}"
