"""The compute behind every step of a foreign log, with a description of what it was made from.

Trainers log different things: seconds of a step, or only the time of day; tokens of a step, or since the
start; the number of devices, or nothing about them. Shapes: N steps of a series.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.ingest.flops import ModelCost
from scalerl.ingest.logs.log import Log, Series, finite
from scalerl.ingest.vocabularies import Vocabulary
from scalerl.record.devices import DEVICES_NOT_LOGGED

MOST = 1e100
"""A total beyond this is not a count."""
GAP_TIMES, GAP_SECONDS = 10.0, 60.0
"""A gap between rows is a standstill if it is this many times the usual one, and this many seconds longer."""
AT_ONCE = 0.1
"""Seconds between rows below which they were written afterwards, not in training."""
LONGEST_STEP = 4 * 3600.0
"""Seconds of a step beyond which they may be milliseconds, of steps of 14 s and more."""
RESET = 0.5
"""A running count that falls below this share of its highest value has been reset."""


@dataclass(frozen=True)
class Counter:
    """A cumulative quantity over steps, 0 before the first; `how` describes what it was made from."""

    step_N: np.ndarray
    total_N: np.ndarray
    how: str

    def at(self, step: float) -> float:
        """Return the total after `step`: linear between logged steps, and at the last rate beyond them."""
        step_N, total_N = self.step_N, self.total_N
        if step > step_N[-1] and len(step_N) > 1:
            rate = (total_N[-1] - total_N[-2]) / (step_N[-1] - step_N[-2])
            return float(total_N[-1] + rate * (step - step_N[-1]))
        return float(np.interp(step, step_N, total_N))


def counters(
    log: Log, vocabulary: Vocabulary, devices: float | None = None, model: ModelCost | None = None
) -> tuple[dict[str, Counter], list[str]]:
    """Make the counters that a log allows, such as GPU-hours (in device-seconds) and FLOPs, with warnings.

    The run had `devices`; by default the number in the log or, with a warning, one if the log has none.
    `model` is the cost of a token.
    """
    warnings: list[str] = []
    # Values of 1e308 add up to inf; what is not below MOST is left out by name at the end.
    with np.errstate(over="ignore", invalid="ignore"):
        seconds = _device_seconds(log, vocabulary, devices, warnings)
        tokens = _counted(log, vocabulary, "tokens", "tokens_so_far", warnings)
        processed = _so_far(log, vocabulary, "tokens_processed_so_far", 1.0, warnings)
        samples = _counted(log, vocabulary, "samples", "samples_so_far", warnings) or _by_config(
            log, vocabulary
        )
        flops = _flops(log, vocabulary, model, tokens, warnings)
    made = {"GPU-hours": seconds, "FLOPs": flops, "tokens": tokens}
    made |= {"tokens_processed": processed, "samples": samples}
    found: dict[str, Counter] = {}
    for name, counter in made.items():
        if counter is not None and (np.abs(counter.total_N) < MOST).all():
            found[name] = counter
        elif counter is not None:
            warnings.append(f"left out, as no run has so much: {counter.how}")
    return found, warnings


def _device_seconds(
    log: Log, vocabulary: Vocabulary, devices: float | None, warnings: list[str]
) -> Counter | None:
    spent = _so_far(log, vocabulary, "gpu_hours_so_far", 3600.0, warnings)
    seconds = spent or _seconds(log, vocabulary, warnings)
    if seconds is None or spent is not None:
        return spent
    for name in _named_seconds(log, vocabulary)[:1]:
        if LONGEST_STEP < (each := float(np.median(log.metrics[name].value_N))) < MOST:
            warnings.append(
                f"a step takes {each:,.0f} s by '{name}': if these are milliseconds, GPU-hours and C_mid are "
                "1,000 times too high (--x steps does without them)"
            )
    if seconds.step_N[0] > 0:
        warnings.append(f"the log begins at step {seconds.step_N[0]:g}: what was spent before is not in it")
    number, why = _sum(log, vocabulary.device_sums)
    for name in vocabulary.matches("devices", log.metrics)[:1]:
        # A job may be resumed on another number of devices: the median is right for most of the run.
        number, why = float(np.median(log.metrics[name].value_N)), name
    if devices:
        number, why = float(devices), "as given"
    if not number:
        warnings.append(DEVICES_NOT_LOGGED)
        return seconds
    how = f"{seconds.how}, x {number:g} devices ({why})"
    return replace(seconds, total_N=seconds.total_N * number, how=how)


def _flops(
    log: Log, vocabulary: Vocabulary, model: ModelCost | None, tokens: Counter | None, warnings: list[str]
) -> Counter | None:
    if model is None:
        return _so_far(log, vocabulary, "flops_so_far", 1.0, warnings)
    if tokens is None:
        warnings.append("no tokens are logged, so that a model's FLOPs cannot be counted")
        return None
    lengths = vocabulary.matches("mean_length", log.metrics)[:1]
    length = float(np.mean(log.metrics[lengths[0]].value_N)) if lengths else math.nan
    if math.isnan(length):
        warnings.append("the length of completions is not logged: attention is left out of the FLOPs")
    each = model.forward(1.0, length if math.isfinite(length) else 0.0)
    # Sampling is one forward pass; training is a forward and a backward pass, which counts as two.
    how = f"4 forward passes of {model.model} ({model.matrix_weights:,} weights) a token of {tokens.how}"
    return Counter(tokens.step_N, 4 * each * tokens.total_N, how)


def _seconds(log: Log, vocabulary: Vocabulary, warnings: list[str]) -> Counter | None:
    """Count wall-clock seconds of training from the seconds of steps, else from the time of day."""
    for name in _named_seconds(log, vocabulary):
        series = log.metrics[name]
        window_N = _window(series.step_N)
        is_of_row = name in vocabulary.matches("row_seconds", log.metrics)
        spent_N = series.value_N * (np.minimum(window_N, 1) if is_of_row else window_N)
        how = name
        # The seconds of a step include its evaluation, which does not count as training compute.
        for evaluation in vocabulary.matches("evaluation_seconds", log.metrics)[:1]:
            aside = log.metrics[evaluation]
            at = np.searchsorted(series.step_N, aside.step_N)
            inside = (at < len(series)) & (aside.step_N > series.step_N[0] - window_N[0])
            np.subtract.at(spent_N, at[inside], aside.value_N[inside])
            how += f" less {evaluation}"
        return _added_up(series.step_N, np.maximum(spent_N, 0.0), how)
    times = log.time_series()
    if len(times) < 2:
        return None
    if np.median(np.diff(times.value_N)) < AT_ONCE:
        warnings.append("rows were written at once, not in training: their times make no GPU-hours")
        return None
    return _by_the_clock(times)


def _named_seconds(log: Log, vocabulary: Vocabulary) -> list[str]:
    """Return the metrics that are seconds of a step or of a row, the best match first."""
    roles = ("step_seconds", "row_seconds")
    return [name for role in roles for name in vocabulary.matches(role, log.metrics)]


def _window(step_N: np.ndarray) -> np.ndarray:
    """Return the number of steps behind each row: a trainer that logs every tenth step logs a mean of ten."""
    gap_N = np.diff(step_N)
    usual = float(np.median(gap_N)) if len(gap_N) else 1.0
    return np.concatenate([[min(step_N[0], usual)], gap_N])


def _added_up(step_N: np.ndarray, spent_N: np.ndarray, how: str) -> Counter:
    """Add up what was spent in the window of every row, from the start of the first window."""
    start = step_N[0] - _window(step_N)[0]
    if start == step_N[0]:  # the first row is that of step 0
        return Counter(step_N, np.cumsum(spent_N) - spent_N[0], how)
    return Counter(np.insert(step_N, 0, start), np.insert(np.cumsum(spent_N), 0, 0.0), how)


def _by_the_clock(times: Series) -> Counter:
    """Count the seconds between rows, without those in which the run stood still or was restarted."""
    gap_N, passed_N = np.diff(times.step_N), np.diff(times.value_N)
    # The median, as a mean would contain the interruptions that it has to find.
    usual = float(np.median(passed_N / gap_N))
    usual_N = usual * gap_N
    stood_N = (passed_N < 0) | ((passed_N > GAP_TIMES * usual_N) & (passed_N > usual_N + GAP_SECONDS))
    how = "the time of day of its rows, evaluations included"
    if stood_N.any():
        lost = float(np.sum((passed_N - usual_N)[stood_N])) / 3600
        how += f", less {int(stood_N.sum())} interruptions of {lost:.3g} hours in all"
    # Before the first row no time is logged: its window is assumed to have taken the usual time.
    spent_N = np.insert(np.where(stood_N, usual_N, passed_N), 0, usual * _window(times.step_N)[0])
    return _added_up(times.step_N, spent_N, how)


def _sum(log: Log, sums: Sequence[str]) -> tuple[float, str]:
    """Return the first sum of products whose keys are all in the config, and its text; 0 without any.

    A product of 0 is left out of the text, such as the GPUs of a role that has none of its own.
    """
    for text in sums:
        products: dict[str, float] = {}
        for product in text.split(" + "):
            numbers = [finite(log.config.get(key)) for key in product.split(" * ")]
            products[product] = math.prod(number if number >= 0 else math.nan for number in numbers)
        total = sum(products.values())
        if 0 < total < math.inf:
            of = " + ".join(product for product, number in products.items() if number)
            return total, of.replace(" * ", " x ")
    return 0.0, ""


def _counted(log: Log, vocabulary: Vocabulary, each: str, so_far: str, warnings: list[str]) -> Counter | None:
    """Return a counter that is logged since the start, or add one up step by step."""
    if (total := _so_far(log, vocabulary, so_far, 1.0, warnings)) is not None:
        return total
    for name in vocabulary.matches(each, log.metrics):
        series = log.metrics[name]
        spent_N = series.value_N * _window(series.step_N)
        return _added_up(series.step_N, spent_N, f"{name}, added up")
    return None


def _so_far(log: Log, vocabulary: Vocabulary, role: str, unit: float, warnings: list[str]) -> Counter | None:
    """Return a counter that is logged since the start; `unit` converts its values."""
    for name in vocabulary.matches(role, log.metrics):
        series = log.metrics[name]
        running_N, resets = _monotone(series.value_N)
        if resets:
            at = ", ".join(f"{series.step_N[n]:g}" for n in resets[:3]) + ", ..." * (len(resets) > 3)
            warnings.append(
                f"'{name}' begins anew at step {at}: what was reached before is added to what comes after"
            )
        step_N, total_N = series.step_N, unit * running_N
        if step_N[0] > 0:
            step_N, total_N = np.insert(step_N, 0, 0.0), np.insert(total_N, 0, 0.0)
        return Counter(step_N, total_N, name)
    return None


def _monotone(value_N: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return a running count that never falls, and the rows at which the logged one was reset.

    A restarted process may count from 0 again. A fall to less than half of the highest so far, from which the
    next row has not recovered, is such a reset, and what had been reached is added from there on. A smaller
    one is a dip (in counts that several workers report), during which the count stands still.
    """
    highest_N = np.maximum.accumulate(value_N)
    if not (value_N < RESET * highest_N).any():
        return highest_N, []
    values, totals, resets = value_N.tolist(), [], []
    reached, highest = 0.0, values[0]
    for n, (value, following) in enumerate(zip(values, [*values[1:], -math.inf], strict=True)):
        if 0 <= value < RESET * highest and following < highest:
            resets.append(n)
            reached, highest = reached + highest, value
        highest = max(highest, value)
        totals.append(reached + highest)
    return np.array(totals), resets


def _by_config(log: Log, vocabulary: Vocabulary) -> Counter | None:
    number, how = _sum(log, vocabulary.sample_sums)
    last = max((float(series.step_N[-1]) for series in log.metrics.values() if len(series)), default=0.0)
    if not (number and last):
        return None
    step_N = np.array([0.0, last])
    return Counter(step_N, number * step_N, f"{how} in every step")
