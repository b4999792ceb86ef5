"""A foreign log as a run: which metric is the pass rate, what compute it is set against, what was assumed."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import InputError, counted, number_of, printable
from scalerl.ingest.counters import ComputeCounters, Counter, counters
from scalerl.ingest.flops import ModelCost, model_cost
from scalerl.ingest.logs.log import Log, Series, finite, listed, presentable
from scalerl.ingest.logs.order import REASONS, code_of
from scalerl.ingest.vocabularies.vocabulary import Vocabulary, is_like
from scalerl.record.left_out import NO_STEP, NONE, VALUELESS, LeftOut, Omitted, shown_step
from scalerl.record.reader import AXES, DeviceSeconds, EvalPoint, Flops, RunRecord, Tokens

OF_STEP = {
    **{"train_reward": "reward_mean", "entropy": "entropy", "truncated": "truncated", "kl": "kl"},
    **{"mean_length": "mean_length", "ratio_clipped": "ratio_clipped", "staleness_mean": "staleness_mean"},
    **{"grad_norm": "grad_norm", "loss": "loss", "lr": "lr"},
}
"""Roles of metrics, by the fields of steps.jsonl that they become."""
_DEVICES = "the number of devices"
_SLACK = 1e-6
_FEW_PERCENT = 5
"""Up to here values above 1 may be rewards with a bonus as well as percentages."""
_WELL_BELOW = -0.05
"""The lowest mean of rewards of -1 and 1 is below this; a single value just below 0 may be of a penalty."""
_OF_PERCENT = re.compile(r"percent(?!ile)|pct|%", re.IGNORECASE)
_AT_ONCE = 4096


@dataclass(frozen=True)
class ReadOptions:
    """How the log of another trainer is to be read; None is as it says itself."""

    pass_rate: str | None = None
    """The metric that is the pass rate, or the column of a table."""
    format: str | None = None
    trainer: str | None = None
    run: str | None = None
    """The name of the run to read; the others need hold nothing that could be a pass rate."""
    devices: float | None = None
    model: Path | ModelCost | None = None
    """The model's folder or config.json, or what a token costs."""
    option: str = "--y"
    """How the user names `pass_rate`, for messages."""

    def __post_init__(self) -> None:
        if self.devices is not None and not 0 < number_of(self.devices, _DEVICES) < math.inf:
            raise InputError(f"{_DEVICES} must be a number above 0, found {self.devices}")

    def cost(self) -> ModelCost | None:
        """Return what a token costs, if FLOPs are to be counted.

        Raises:
            InputError: the model's config.json cannot be read.
        """
        return model_cost(self.model) if isinstance(self.model, Path) else self.model

    def check_used(self, paths: Sequence[str | Path], foreign: bool, option: str = "--{}") -> None:
        """Raise an InputError if something was set here, and of `paths` none is the log of another trainer.

        `option` is how the user sets it. The column of pass rates is not in question: tables have one, too.
        """
        names = ("format", "trainer", "run", "devices", "model")
        given = [option.format(name) for name in names if getattr(self, name) is not None]
        if given and not foreign:
            which = f"{paths[0]} is not" if len(paths) == 1 else f"none of {', '.join(map(str, paths))} is"
            raise InputError(f"{', '.join(given)}: only for the log of another trainer, which {which}")


@dataclass(frozen=True)
class Imported:
    """A run that was read from a foreign log."""

    record: RunRecord
    columns: Mapping[str, Series]
    """By the fields of steps.jsonl that they become."""
    taken: tuple[tuple[str, str], ...]
    """What each metric was taken for, as (what, text)."""
    warnings: tuple[str, ...]
    left_out: LeftOut = NONE
    """The evaluations that do not count."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.record.config

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of steps.jsonl, one for every step at which anything was logged."""
        # Series have steps of their own: a merge needs no table of all steps by all metrics.
        cells = heapq.merge(*(_cells(*column) for column in self.columns.items()), key=itemgetter(0))
        for step, row in itertools.groupby(cells, key=itemgetter(0)):
            named = list(row)
            yield {"step": int(step), "time": named[0][1], **{name: value for _, _, name, value in named}}


def _cells(name: str, series: Series) -> Iterator[tuple[float, float, str, float]]:
    """Yield step, Unix seconds, `name` and value, converted some thousand rows at a time."""
    # All rows as Python floats at once would take several times the memory of the arrays.
    for start in range(0, len(series), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        columns = (column_N[rows].tolist() for column_N in (series.step_N, series.time_N, series.value_N))
        yield from ((step, time, name, value) for step, time, value in zip(*columns, strict=True))


def as_run(log: Log, vocabulary: Vocabulary, asked: ReadOptions) -> Imported:
    """Make a run of a log.

    Raises:
        InputError: nothing in it can be taken for a pass rate, or what is named cannot.
    """
    log = presentable(log)
    warnings = list(log.notes)
    name, others = _pass_rate_metric(log, vocabulary, asked, warnings)
    series = log.metrics[name]
    limits.EVALUATIONS.check(len(series), log.source)
    left_out = left_out_of(log, name)
    told = left_out.sentences()
    # The ending comes first: a view with room for one warning shows the first.
    warnings = [*told, *warnings] if left_out.ending else [*warnings, *told]
    value_N = _unscaled(series.value_N, name, log, vocabulary, warnings)
    is_share = any(is_like(name, pattern) for pattern in vocabulary.shares)
    rate_N, how = as_pass_rate(value_N, name, log.source, asked.option, is_share)
    if how:
        warnings.append(how)
    made = counters(log, vocabulary, asked.devices, asked.cost())
    warnings += made.warnings
    taken = [
        ("pass rate", f"{name} ({counted(len(series), 'evaluation')})"),
        *_taken_counters(made),
    ]
    if others:
        taken.insert(1, ("other held-out metrics", f"{listed(others)} ({asked.option} NAME)"))
    columns = _columns(log, vocabulary, taken, warnings)
    noise = {
        role: log.metrics[name]
        for role in ("n_prompts", "n_samples", "mean_p_1mp")
        for name in vocabulary.matches(role, log.metrics)[:1]
    }
    named: dict[str, Any] = {"n_samples": n_samples(name)}
    points = tuple(
        replace(_point(step, rate, time, made, columns), **(named | _known_noise(noise, step)))
        for step, rate, time in zip(
            series.step_N.tolist(), rate_N.tolist(), series.time_N.tolist(), strict=True
        )
    )
    config = {
        "name": log.name,
        "source": {"path": log.source, "format": log.format, "trainer": vocabulary.trainer},
        "taken": dict(taken),
        "assumed": list(warnings),
        "trainer_config": {
            key: value for key, value in log.config.items() if isinstance(value, str | int | float | None)
        },
    }
    if len(left_out):
        config["left_out"] = left_out.to_json()
    config |= _budget(log.config)
    record = RunRecord(Path(log.source), config, points, warnings=tuple(warnings))
    return Imported(record, columns, tuple(taken), tuple(warnings), left_out)


def left_out_of(log: Log, name: str) -> LeftOut:
    """Return the evaluations of a metric that do not count, and whether the newest are among them."""
    omitted = log.omitted.get(name)
    if omitted is None:
        return NONE
    step_V = np.where(omitted.reason_V == code_of(NO_STEP), math.nan, omitted.step_V)
    places = zip(omitted.step_V.tolist(), omitted.line_V.tolist(), omitted.reason_V.tolist(), strict=True)
    found = [Omitted(REASONS[code], shown_step(step), line or None) for step, line, code in places]
    series = log.metrics.get(name)
    return LeftOut.of_log(found, step_V, series.step_N if series is not None else np.zeros(0), name)


def _budget(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "budget" of our own trainer as its tracker kept it (MLflow as text), or nothing."""
    # Without it a fit of our own run would change its default axis by way of a tracker.
    kind, amount = config.get("budget.kind"), config.get("budget.amount")
    with suppress(TypeError, ValueError):
        if kind in AXES and 0 < float(str(amount)) < math.inf:
            return {"budget": {"kind": kind, "amount": float(str(amount))}}
    return {}


def _pass_rate_metric(
    log: Log, vocabulary: Vocabulary, asked: ReadOptions, warnings: list[str]
) -> tuple[str, list[str]]:
    """Choose the metric of the pass rate; return it and the other held-out ones."""
    if asked.pass_rate is not None:
        if (name := printable(asked.pass_rate)) in log.metrics:
            return name, []
        raise InputError(
            f"{log.source}: no metric '{asked.pass_rate}' with numbers; "
            f"{_all_left_out(log, [name])}there are {listed(_likely(log.names))}"
        )
    if held_out := vocabulary.matches("held_out", log.metrics):
        made = {
            name: len(log.metrics[name])
            + sum(n for reason, n in left_out_of(log, name).counts if reason in VALUELESS)
            for name in held_out
        }
        # NaN counts as made: a pass rate that diverged must not give way to a metric that did not.
        first = max(held_out, key=lambda name: made[name])  # the first of several with the most
        return first, [name for name in held_out if name != first]
    without = vocabulary.matches("held_out", log.omitted)
    for name in without:
        warnings += left_out_of(log, name).sentences()
    for name in vocabulary.matches("train_reward", log.metrics):
        warnings.append(
            f"nothing is held out: '{name}' is the reward of training, on prompts that are trained on, "
            "sampled by weights of several versions; its curve may differ from that of a held-out pass rate"
        )
        return name, []
    raise InputError(
        f"{log.source}: nothing here is known as a pass rate or a reward; {_all_left_out(log, without)}"
        f"name one with {asked.option}: {listed(_likely(log.names)) or 'there are no metrics with numbers'}"
    )


def _all_left_out(log: Log, names: Sequence[str]) -> str:
    """Explain why metrics that were logged have no evaluation that counts; empty where none was logged."""
    told = [text for name in names for text in left_out_of(log, name).sentences()[-1:]]
    return f"{told[0]}; " if told else ""


def _unscaled(
    value_N: np.ndarray, name: str, log: Log, vocabulary: Vocabulary, warnings: list[str]
) -> np.ndarray:
    """Divide rewards by what a right answer earns, where a trainer scales them."""
    for pattern, key, usual in vocabulary.scaled:
        if is_like(name, pattern):
            # A log that was exported without its config has the values and not their unit.
            said = finite(log.config.get(key))
            earned = said if said > 0 else usual
            warnings.append(
                f"'{name}' is in units of {key}: divided by {earned:g}"
                + ("" if said > 0 else ", its usual value, as the log does not say it")
            )
            return value_N / earned
    return value_N


def _likely(names: Sequence[str]) -> list[str]:
    """Sort names, those that sound like a pass rate first."""
    sound = re.compile(r"acc|pass|reward|score|success|correct|mean@|avg@", re.IGNORECASE)
    return sorted(names, key=lambda name: (not sound.search(name), name))


def as_pass_rate(
    value_N: np.ndarray, name: str, source: str, option: str = "--y", is_share: bool = False
) -> tuple[np.ndarray, str]:
    """Convert values to shares in [0, 1]; return them and what was done in words, empty if nothing.

    A name that says percent is believed, also of a run that begins below 1, unless it is known for a share.

    Raises:
        InputError: they are neither shares, nor percentages, nor rewards of -1 and 1; or they may be rewards
            with a bonus or a penalty as well. It says that `option` names another.
    """
    low, high = float(value_N.min()), float(value_N.max())
    is_positive, is_low = low >= -_SLACK, high <= 1 + _SLACK
    # Before all else: percentages of a run below 1 % look like shares, and only the name tells.
    if _OF_PERCENT.search(name) and not is_share and is_positive and high <= 100 + _SLACK:
        return np.clip(value_N / 100, 0.0, 1.0), f"'{name}' is named for percentages: divided by 100"
    if is_positive and is_low:
        return np.clip(value_N, 0.0, 1.0), ""
    if -1 - _SLACK <= low <= _WELL_BELOW and is_low:
        return np.clip((value_N + 1) / 2, 0.0, 1.0), (
            f"'{name}' goes below 0: it is taken for a mean of rewards of -1 and 1, and made a pass rate by "
            "(1 + reward) / 2"
        )
    if is_positive and _FEW_PERCENT < high <= 100 + _SLACK:
        how = f"'{name}' goes up to {high:.3g}: it is taken for percentages"
        return np.clip(value_N / 100, 0.0, 1.0), how
    if _WELL_BELOW < low < 0 and is_low:
        why = (
            f"{source}: '{name}' goes down to {low:.3g}: no share, and too little below 0 to tell rewards of "
            "-1 and 1 (as a pass rate: (1 + reward) / 2) from rewards with a penalty, for the length say: "
            f"name the metric of right answers with {option}"
        )
    elif is_positive and high <= _FEW_PERCENT:
        why = (
            f"{source}: '{name}' goes up to {high:.3g}: no share, and too little for percentages; a reward "
            "with a bonus, for the format say, is no pass rate: name the metric of right answers with "
            f"{option}"
        )
    else:
        why = (
            f"{source}: '{name}' lies between {low:.3g} and {high:.3g}, which is no pass rate, no percentage "
            f"and no mean of rewards of -1 and 1; name another metric with {option}"
        )
    raise InputError(why)


def n_samples(name: str) -> int:
    """Return the completions per prompt in a metric's name (mean@16, avg@8, mean_at_16); 0 without."""
    found = re.search(r"(?:mean|avg)(?:@|_at_)(\d+)", name)
    # Seven digits and more are no count of samples, and int() of thousands of digits raises.
    return int(found[1]) if found and len(found[1]) < 7 else 0


def _columns(
    log: Log, vocabulary: Vocabulary, taken: list[tuple[str, str]], warnings: list[str]
) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for role, field in OF_STEP.items():
        for name in vocabulary.matches(role, log.metrics)[:1]:
            found[field] = log.metrics[name]
            taken.append((field.replace("_", " "), name))
    if "truncated" not in found:
        for name in vocabulary.matches("finished", log.metrics)[:1]:
            series = log.metrics[name]
            found["truncated"] = replace(series, value_N=1 - series.value_N)
            taken.append(("truncated", f"1 - {name}"))
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
    step: float, rate: float, time: float, made: ComputeCounters, columns: Mapping[str, Series]
) -> EvalPoint:
    def total(counter: Counter | None) -> float:
        return counter.at(step) if counter is not None else math.nan

    health: dict[str, Any] = {
        name: columns[name].at(step) for name in ("truncated", "mean_length", "entropy") if name in columns
    }
    tokens, flops = total(made.tokens), total(made.flops)
    processed = total(made.tokens_processed)
    return EvalPoint(
        step=int(step),
        pass_rate=rate,
        time=time,
        # Which device did what is not told: all of it is called training.
        device_seconds=DeviceSeconds(0.0, total(made.device_seconds), math.nan, 0.0),
        # How many tokens were trained on only our own logs say; of the FLOPs a quarter is the sampling.
        tokens=Tokens(tokens, processed - tokens),
        flops=Flops(flops / 4, 3 * flops / 4),
        samples=total(made.samples),
        **health,
    )


def _known_noise(series: Mapping[str, Series], step: float) -> dict[str, Any]:
    """Return the fields of an evaluation's sampling noise, where a trainer logs them all; else nothing."""
    found = {role: one.at(step) for role, one in series.items()}
    if len(found) < 3 or any(math.isnan(value) or value < 0 for value in found.values()):
        return {}
    return {role: value if role == "mean_p_1mp" else int(value) for role, value in found.items()}


def _taken_counters(made: ComputeCounters) -> list[tuple[str, str]]:
    named = {"GPU-hours": made.device_seconds, "FLOPs": made.flops}
    named |= {"tokens": made.tokens, "tokens_processed": made.tokens_processed, "samples": made.samples}
    return [(what, counter.how) for what, counter in named.items() if counter is not None]
