"""Rates for a plan measured in a run: the throughput of each role, from steps.jsonl, and the curve.

A run records the work of each role and its working seconds: tokens generated, tokens trained, completions
consumed. It does not record how fast a role would be with other decode slots or another batch size;
docs/howto/plan.md says what is assumed about that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.errors import InputError
from scalerl.plan.job import Lengths, PlannedJob
from scalerl.plan.rates import Decode, DriverRates, Rates, Trainer, WeightRates
from scalerl.plan.simulate import simulate
from scalerl.record.reader import RunRecord

LEAST_STEPS = 5
"""The fewest steps that give rates."""
_WARM_UP = 0.25
"""Share of the steps that is left out, as the first ones fill the pipeline and caches."""
_FIXED = 0.5
"""Share of a full decode step that does not depend on the number of slots in use (assumed)."""
_TAIL = 2.0
"""The 95th percentile of the lengths as a multiple of their mean (assumed)."""
_ROUNDS = 2


def rates_of(record: RunRecord) -> Rates:
    """Measure the rates of a run of `scalerl train`, over the steps after its first quarter.

    Raises:
        InputError: the run has too few steps, or lacks the seconds of its roles or the recipe.
    """
    from scalerl.rl.config.recipe import from_dict

    if not isinstance(values := record.config.get("recipe"), Mapping):
        raise InputError(f"{record.path / 'config.json'}: has no recipe: only runs of scalerl train do")
    recipe = from_dict(values, str(record.path / "config.json"))
    job, rows, trainers = PlannedJob.of(recipe), _rows(record), record.trainers
    first, last, counted = rows[0], rows[-1], rows[1:]
    completions = sum(row["completions"] for row in counted)
    decoded = sum(row["completions"] * row["mean_length"] for row in counted)
    used = max(sum(row["groups_used"] for row in counted) / sum(row["groups"] for row in counted), 1e-3)
    generated = _grown(first, last, "tokens", "generated")
    # Convert device-seconds, as recorded, to seconds of a generator or trainer, as simulated.
    devices_each = record.devices("generate", recipe.processes) / recipe.processes
    of_trainer = trainers / record.devices("train", trainers)
    generate = _grown(first, last, "device_seconds", "generate") / devices_each
    train = _grown(first, last, "device_seconds", "train") * of_trainer
    waited = _grown(first, last, "idle_seconds", "train") * of_trainer
    # Runs of older versions do not record weight syncs.
    syncs = [row["weight_sync"]["seconds"] for row in counted if row.get("weight_sync", {}).get("bytes")]
    sync = sum(syncs)
    between = max(last["wall_seconds"] - first["wall_seconds"] - (train + waited) / trainers - sync, 0.0)
    mean = decoded / completions
    of_token = generate / max(generated, 1.0)
    rates = Rates(
        # Split so that a generator with all slots in use takes `of_token` seconds per token.
        decode=Decode(max(_FIXED * of_token * job.decode_slots, 1e-12), (1 - _FIXED) * of_token),
        trainer=Trainer(train / max(used * decoded, 1.0), used=used),
        lengths=Lengths(mean, max(min(_TAIL * mean, float(job.cut.longest)), mean)),
        driver=DriverRates(step=between / len(counted))
        if job.overlapped
        else DriverRates(completion=between / completions),
        # With `inline` the generator updates its weights within the sync, and that counts as its work.
        weights=WeightRates(publish=sync / max(len(syncs), 1) if recipe.apart else 0.0),
        evaluate=last["device_seconds"]["evaluate"]
        / (devices_each if job.evaluations.by_generators else record.devices("evaluate", 1))
        / max(len(record.evals), 1),
        devices_per_generator=max(round(devices_each), 1),
        source=f"measured in {record.name}, steps {first['step'] + 1} to {last['step']}",
    )
    return _as_busy(rates, job, recipe.processes, trainers, of_token)


def evaluated_every(record: RunRecord) -> float | None:
    """Return the mean number of steps between evaluations of a run; None if there are too few."""
    steps = [point.step for point in record.evals]
    return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 and steps[-1] > steps[0] else None


def _as_busy(rates: Rates, job: PlannedJob, generators: int, trainers: int, seconds_of_token: float) -> Rates:
    """Shorten the decode steps until a simulation of the run takes as many seconds per token as the run did,
    whose slots were not all in use."""
    for _ in range(_ROUNDS):
        found = simulate(job, rates, generators, trainers)
        simulated = (1 - found.generators_idle) * generators / found.tokens_per_second
        faster = seconds_of_token / simulated
        decode = Decode(rates.decode.base * faster, rates.decode.slot * faster)
        rates = replace(rates, decode=decode)
    return rates


def _rows(record: RunRecord) -> Sequence[Mapping[str, Any]]:
    rows = record.steps()
    rows = rows[int(len(rows) * _WARM_UP) :]
    path = record.path / "steps.jsonl"
    if len(rows) <= LEAST_STEPS:
        raise InputError(f"{path}: rates need {LEAST_STEPS} steps after the first quarter; there are fewer")
    fields = ("device_seconds", "idle_seconds", "wall_seconds", "tokens", "completions", "mean_length")
    if missing := [name for name in fields if any(name not in row for row in rows)]:
        raise InputError(f"{path}: a step has no {missing[0]!r}, which scalerl train records")
    return rows


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], field: str, key: str) -> float:
    return float(after[field][key]) - float(before[field][key])


@dataclass(frozen=True)
class Target:
    """Completions, hours and dollars to a pass rate, as intervals; infinite if it may never be reached."""

    pass_rate: float
    level: float
    samples: tuple[float, float]
    hours: tuple[float, float]
    dollars: tuple[float, float] | None
    identified: bool
    why: str
    """Why the ceiling of the run's curve is `identified` by the data, or not; a sentence."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with None for infinities."""
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
    """Estimate completions, hours and dollars to the pass rate `target` by the curve of `record`.

    The curve is over completions, which do not depend on the machine. It holds for the run's recipe: another
    batch size or schedule has another curve.

    Raises:
        InputError: `target` is not between 0 and 1, or the run has no counter of completions.
        CannotAnswerError: its evaluations do not allow a fit.
    """
    from scalerl.curve import Points, fit

    if not 0 < target < 1:
        raise InputError(f"target: a pass rate between 0 and 1, found {target:g}")
    found = fit(Points.from_record(record, "samples"), level=level)
    low, high = samples = found.compute_to(target)
    hours = low / completions_per_hour, high / completions_per_hour
    dollars = None if dollars_per_hour is None else (hours[0] * dollars_per_hour, hours[1] * dollars_per_hour)
    return Target(target, level, samples, hours, dollars, found.identified, found.why)
