"""What a plan costs to a target, by the forecast of a run."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from scalerl.errors import InputError
from scalerl.record.reader import RunRecord


@dataclass(frozen=True)
class Target:
    """Completions, hours and dollars to a pass rate, each with its interval; infinite where it may never be
    reached."""

    pass_rate: float
    level: float
    samples: tuple[float, float]
    hours: tuple[float, float]
    dollars: tuple[float, float] | None
    identified: bool
    why: str
    """Whether the data fix the ceiling of the run's curve, and a sentence why."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; null for what is infinite."""
        found = asdict(self)
        for name in ("samples", "hours", "dollars"):
            if found[name] is not None:
                found[name] = [value if math.isfinite(value) else None for value in found[name]]
        return found


def to_target(
    record: RunRecord,
    target: float,
    completions_per_hour: float,
    dollars_per_hour: float | None,
    level: float = 0.95,
) -> Target:
    """The completions to `target` by the curve of `record`, at so many an hour.

    The curve is over completions, which do not depend on the machine. It is that of the run's recipe: another
    batch or schedule has another curve.

    Raises:
        InputError: the run has no counter of completions.
        CannotAnswerError: its evaluations do not make a curve.
    """
    from scalerl.curve import Points, fit

    if not 0 < target < 1:
        raise InputError(f"target: a pass rate between 0 and 1, found {target:g}")
    found = fit(Points.from_record(record, "samples"), level=level)
    low, high = samples = found.compute_to(target)
    hours = low / completions_per_hour, high / completions_per_hour
    dollars = None if dollars_per_hour is None else (hours[0] * dollars_per_hour, hours[1] * dollars_per_hour)
    return Target(target, level, samples, hours, dollars, found.identified, found.why)
