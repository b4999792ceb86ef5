"""A foreign log as a run: which metric is the pass rate, over which compute, under which assumptions."""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import InputError, counted, listed
from scalerl.ingest.choice import choose, left_out_of
from scalerl.ingest.counters import Counter, counters
from scalerl.ingest.logs.log import Log, Series, presentable
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.vocabularies import Vocabulary
from scalerl.record.evaluation import AXES, DeviceSeconds, EvalPoint, Flops, Tokens
from scalerl.record.reader import RunRecord

OF_STEP = {
    **{"train_reward": "reward_mean", "entropy": "entropy", "truncated": "truncated", "kl": "kl"},
    **{"mean_length": "mean_length", "ratio_clipped": "ratio_clipped", "staleness_mean": "staleness_mean"},
    **{"grad_norm": "grad_norm", "loss": "loss", "lr": "lr"},
}
"""Roles of metrics, with the fields of steps.jsonl that they become."""
_SLACK = 1e-6
_AT_ONCE = 4096


def _steps(columns: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    # Series have steps of their own: a merge needs no table of all steps by all metrics.
    cells = heapq.merge(*(_cells(*column) for column in columns.items()), key=itemgetter(0))
    for step, row in itertools.groupby(cells, key=itemgetter(0)):
        named = list(row)
        yield {"step": int(step), "time": named[0][1], **{name: value for _, _, name, value in named}}


def _cells(name: str, series: Series) -> Iterator[tuple[float, float, str, float]]:
    """Yield step, Unix seconds, `name` and value, converting some thousand rows at a time."""
    # All rows as Python floats at once would take several times the memory of the arrays.
    for start in range(0, len(series), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        columns = (column_N[rows].tolist() for column_N in (series.step_N, series.time_N, series.value_N))
        yield from ((step, time, name, value) for step, time, value in zip(*columns, strict=True))


def as_run(
    log: Log, vocabulary: Vocabulary, asked: ReadOptions, training: tuple[Log, Vocabulary] | None = None
) -> RunRecord:
    """Make a run of a log; its config says what each metric was used for, and what is left out.

    Compute and training metrics are those of another log, `training`, if it is given.

    Raises:
        InputError: nothing in it can be used as a pass rate, or the named metric cannot; or `training` does
            not show what the evaluated steps cost.
    """
    log = _named_for_a_folder(log, vocabulary)
    trained, its_names = (_named_for_a_folder(*training), training[1]) if training else (log, vocabulary)
    chosen, said = choose(log, vocabulary, asked)
    series, metric = chosen.series, chosen.metric
    limits.EVALUATIONS.check(len(series), log.source)
    left_out = chosen.left_out if asked.pooled else left_out_of(log, metric.name)
    sentences = left_out.sentences()
    # The ending comes first: a view with room for one warning shows the first.
    warnings = [*sentences, *log.notes] if left_out.ending else [*log.notes, *sentences]
    made, doubts = counters(trained, its_names, asked.devices, asked.cost())
    warnings += [*said, *doubts]
    if training:
        warnings += trained.notes
        _check_covers(trained, made, series)
    taken = {"pass rate": f"{metric}; {counted(len(series), 'evaluation')}"}
    if metric.others:
        taken["other held-out metrics"] = f"{listed(metric.others)} ({asked.naming('NAME')})"
    taken |= {what: counter.how for what, counter in made.items()}
    if training:
        taken["training log"] = trained.source
    columns = _columns(trained, its_names, taken, warnings)
    noise = {
        role: log.metrics[name]
        for role in ("n_prompts", "n_samples", "mean_p_1mp")
        for name in vocabulary.matches(role, log.metrics)[:1]
    }
    named: dict[str, Any] = {"n_samples": metric.n_samples}
    points = tuple(
        replace(_point(step, rate, time, made, columns), **(named | _known_noise(noise, step)))
        for step, rate, time in zip(
            series.step_N.tolist(), chosen.rate_N.tolist(), series.time_N.tolist(), strict=True
        )
    )
    config = {
        "name": log.name,
        "source": {"path": log.source, "format": log.format, "trainer": vocabulary.trainer},
        "metric": metric.to_json(),
        "taken": taken,
        "assumed": list(warnings),
        "trainer_config": {
            key: value
            for key, value in {**trained.config, **log.config}.items()
            if isinstance(value, str | int | float | None)
        },
    }
    if len(left_out):
        config["left_out"] = left_out.to_json()
    config |= _budget(log.config)
    steps = partial(_steps, columns)
    return RunRecord(Path(log.source), config, points, warnings=tuple(warnings), source_steps=steps)


def _named_for_a_folder(log: Log, vocabulary: Vocabulary) -> Log:
    return presentable(log.counted_from_1() if vocabulary.counts_from_0 else log)


def _check_covers(training: Log, made: Mapping[str, Counter], evaluated: Series) -> None:
    """Raise an InputError unless a training log counts compute up to the last evaluated step."""
    if not made:
        raise InputError(f"{training.source}: no times, tokens or FLOPs of steps in it")
    last = max(training.metrics.values(), key=lambda series: series.step_N[-1]).step_N[-2:]
    # A trainer that logs every tenth step saves its last weights between two rows: one row more is allowed.
    if evaluated.step_N[-1] > last[-1] + np.ptp(last):
        what = f"step {evaluated.step_N[-1]:g} was evaluated"
        raise InputError(f"{training.source}: ends at step {last[-1]:g}, but {what}: is it of another run?")


def _budget(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "budget" of our own trainer as its tracker kept it (MLflow as text), else nothing."""
    # Without it, reading our own run from a tracker would change its default axis.
    kind, amount = config.get("budget.kind"), config.get("budget.amount")
    with suppress(TypeError, ValueError):
        if kind in AXES and 0 < float(str(amount)) < math.inf:
            return {"budget": {"kind": kind, "amount": float(str(amount))}}
    return {}


def _columns(
    log: Log, vocabulary: Vocabulary, taken: dict[str, str], warnings: list[str]
) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for role, field in OF_STEP.items():
        for name in vocabulary.matches(role, log.metrics)[:1]:
            found[field] = log.metrics[name]
            taken[field.replace("_", " ")] = name
    if "truncated" not in found:
        for name in vocabulary.matches("finished", log.metrics)[:1]:
            series = log.metrics[name]
            found["truncated"] = replace(series, value_N=1 - series.value_N)
            taken["truncated"] = f"1 - {name}"
    if "truncated" not in found:
        return found
    series = found["truncated"]
    low, high = float(series.value_N.min()), float(series.value_N.max())
    if low < -_SLACK or high > 1 + _SLACK:
        warnings.append(f"the share of truncated completions lies between {low:.3g} and {high:.3g}: no share")
    elif len(series) >= 10 and low == high and low > 0:
        warnings.append(
            f"the share of truncated completions is {low:.3g} in all {len(series)} rows: is it measured?"
        )
    return found


def _point(
    step: float, rate: float, time: float, made: Mapping[str, Counter], columns: Mapping[str, Series]
) -> EvalPoint:
    def total(what: str) -> float:
        return made[what].at(step) if what in made else math.nan

    health: dict[str, Any] = {
        name: columns[name].at(step) for name in ("truncated", "mean_length", "entropy") if name in columns
    }
    tokens, flops = total("tokens"), total("FLOPs")
    return EvalPoint(
        step=int(step),
        pass_rate=rate,
        time=time,
        # The log does not say which device did what: all of it counts as training.
        device_seconds=DeviceSeconds(0.0, total("GPU-hours"), math.nan, 0.0),
        # Only our own logs say how many tokens were trained on; a quarter of the FLOPs is sampling.
        tokens=Tokens(tokens, total("tokens_processed") - tokens),
        flops=Flops(flops / 4, 3 * flops / 4),
        samples=total("samples"),
        **health,
    )


def _known_noise(series: Mapping[str, Series], step: float) -> dict[str, Any]:
    """Return the fields of an evaluation's sampling noise, if a trainer logs all of them; else nothing."""
    found = {role: one.at(step) for role, one in series.items()}
    if len(found) < 3 or any(math.isnan(value) or value < 0 for value in found.values()):
        return {}
    return {role: value if role == "mean_p_1mp" else int(value) for role, value in found.items()}
