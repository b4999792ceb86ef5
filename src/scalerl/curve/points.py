"""The points to fit: compute, pass rate and known noise of every evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from scalerl.errors import InputError, counted, listed
from scalerl.frames import FRAME, numbers_in, numbers_of
from scalerl.numbers import amount_text
from scalerl.record.alarms import warnings_of
from scalerl.record.evaluation import AXES, in_dollars
from scalerl.record.left_out import NONE, LeftOut, Omitted
from scalerl.record.metric import GIVEN, Metric
from scalerl.record.prompts import noise_between
from scalerl.record.reader import RunRecord

ONE_SAMPLE = "the evaluation noise is unknown at one sample per prompt"
"""A warning: one sample of a prompt does not determine the spread between samples."""
MOST_FAILED = 0.01
"""Share of an evaluation's completions without a verdict above which a warning says so."""
_COMPUTE = (1e-300, 1e300)
"""The range of positive compute: the prior of C_mid reaches beyond it and must stay within a float64."""
_CLOCK = 1e9
"""A Unix time of 2001: a time of day is larger, and nearly constant over a run."""
_LARGEST_NOISE = 0.5  # the sd of a value in [0, 1] is at most this
NOISE_FIELDS = ("mean_p_1mp", "n_prompts", "n_samples")
"""The columns of an evaluation that determine its sampling noise."""
LABELS = (
    *("dataset", "data_set", "data_source", "benchmark", "task", "domain", "subset", "split", "metric"),
    *("run", "run_id", "run_name", "experiment", "recipe", "model", "seed"),
)
"""The columns of a table that tell data sets or runs apart."""
_PER_POINT = ("pass_rate_N", "noise_sd_N", "samples_N", "step_N", "line_N")


@dataclass(frozen=True, eq=False)
class Further:
    """Further numeric columns of a table, for all its rows by compute; NaN where a cell is not a number."""

    compute_R: np.ndarray
    step_R: np.ndarray
    values: Mapping[str, np.ndarray]
    """By name, each of shape (R,)."""


@dataclass(frozen=True, eq=False)
class Points:
    """Evaluations of one run on one compute axis, in any order; repeated compute means replicates.

    Raises:
        InputError: lengths differ, or a compute, a pass rate, a noise or a sample size is out of range.
    """

    compute_N: np.ndarray
    """Cumulative training compute, in the unit of `axis`; 0 before any training."""
    pass_rate_N: np.ndarray
    """Mean pass rate on the held-out prompts, a share in [0, 1]."""
    noise_sd_N: np.ndarray
    """Sampling noise (sd) of the pass rate on fixed prompts, sqrt(mean p(1-p) / (n k)), or the estimate that
    `noise_from` names; NaN when not known."""
    samples_N: np.ndarray
    """Completions behind the pass rate, prompts times samples per prompt; NaN when not known."""
    step_N: np.ndarray | None = None
    """Trainer step of every evaluation, if known: correlated noise decays with the distance in steps."""
    source: str = "points"
    """The file or folder that errors name."""
    axis: str = "compute"
    line_N: np.ndarray | None = None
    """Line of `source` that each point comes from, for errors."""
    warnings: tuple[str, ...] = ()
    left_out: LeftOut = NONE
    """Evaluations that were read but do not count. With an `ending`, no fit that includes the last point
    identifies a ceiling."""
    metric: Metric = GIVEN
    """The metric whose values the pass rates are."""
    noise_from: Literal["samples", "prompts"] = "samples"
    """What `noise_sd_N` comes from: the number of samples, or how prompts differ between evaluations."""
    further: Further | None = field(default=None, repr=False)
    """Other numeric columns of the table, for the chart."""

    def __post_init__(self) -> None:
        if self.compute_N.ndim != 1:
            raise InputError(f"{self.source}: compute has {self.compute_N.ndim} axes, expected one")
        n = len(self.compute_N)
        for name in _PER_POINT:
            array = getattr(self, name)
            if array is not None and array.shape != (n,):
                raise InputError(f"{self.source}: {name} has {array.size} values for {n} of compute")
        c_N, rate_N, axis = self.compute_N, self.pass_rate_N, self.axis
        sd_N, samples_N, (low, high) = self.noise_sd_N, self.samples_N, _COMPUTE
        self._check(~np.isfinite(c_N), c_N, axis, "is not a finite number")
        self._check(c_N < 0, c_N, axis, "is negative: expected 0 or more")
        beyond_N = (c_N > 0) & ~((c_N >= low) & (c_N <= high))
        self._check(beyond_N, c_N, axis, f"is outside of {low:g} to {high:g}: choose another unit")
        self._check(~np.isfinite(rate_N), rate_N, "pass rate", "is not a finite number")
        self._check(rate_N > 1, rate_N, "pass rate", f"is above 1: {_scale(rate_N)}")
        self._check(rate_N < 0, rate_N, "pass rate", "is below 0: expected [0, 1]")
        noise = f"is outside of [0, {_LARGEST_NOISE:g}]: expected the standard deviation of the pass rate"
        self._check((sd_N < 0) | (sd_N > _LARGEST_NOISE), sd_N, "noise sd", noise)
        bad_N = (samples_N <= 0) | np.isinf(samples_N)
        self._check(bad_N, samples_N, "number of samples", "must be finite and above 0")
        if self.step_N is not None:
            self._check(~np.isfinite(self.step_N), self.step_N, "step", "is not a finite number")

    def _check(self, bad_N: np.ndarray, value_N: np.ndarray, name: str, fault: str) -> None:
        if bad_N.any():
            i = int(np.argmax(bad_N))
            word = "row" if self.source == FRAME else "line"
            place = f"point {i + 1}" if self.line_N is None else f"{word} {int(self.line_N[i])}"
            raise InputError(f"{self.source}, {place}: {name} {value_N[i]:.15g} {fault}")

    def __len__(self) -> int:
        return len(self.compute_N)

    def select(self, keep_N: np.ndarray) -> Points:
        """Return the points that `keep_N` (booleans, or positions in the wanted order) selects."""
        arrays = {name: getattr(self, name) for name in ("compute_N", *_PER_POINT)}
        found = replace(self, **{k: None if v is None else v[keep_N] for k, v in arrays.items()})
        if self.left_out.ending and found.compute_N.max(initial=-1.0) < self.compute_N.max(initial=-1.0):
            # Without the last point this is the run at an earlier time, when nothing had gone wrong.
            warnings = tuple(text for text in self.warnings if text != self.left_out.ending)
            found = replace(found, left_out=replace(self.left_out, ending=""), warnings=warnings)
        return found

    def omitted(self, reason: str) -> LeftOut:
        """Return these points as evaluations that do not count, for one reason."""
        steps = [None] * len(self) if self.step_N is None else [int(step) for step in self.step_N]
        lines = [None] * len(self) if self.line_N is None else [int(line) for line in self.line_N]
        return LeftOut.of([Omitted(reason, *place) for place in zip(steps, lines, strict=True)])

    def kept_from(self, min_compute: float) -> np.ndarray:
        """Return which points `min_compute` does not cut, booleans (N,): those from it on, and compute 0."""
        return (self.compute_N == 0) | (self.compute_N >= min_compute)

    @classmethod
    def from_arrays(
        cls,
        compute: Any,
        pass_rate: Any,
        *,
        noise_sd: Any = None,
        samples: Any = None,
        step: Any = None,
        source: str = "points",
        axis: str = "compute",
    ) -> Points:
        """Make points from two sequences of numbers, with noise, samples and steps where they are known.

        `noise_sd` and `samples` (completions behind a pass rate, all prompts together) may be one number for
        all points.

        Raises:
            InputError: a value is not a number, or as for `Points`.
        """
        compute_N = numbers_of(compute, f"{source}, compute")
        return cls(
            compute_N,
            numbers_of(pass_rate, f"{source}, pass rate"),
            _spread(noise_sd, f"{source}, noise sd", compute_N),
            _spread(samples, f"{source}, number of samples", compute_N),
            None if step is None else numbers_of(step, f"{source}, step"),
            source,
            axis,
        )

    @classmethod
    def from_frame(
        cls, frame: Any, x: str = "gpu_hours", y: str = "pass_rate", price: float | None = None
    ) -> Points:
        """Read the rows of a pandas data frame that have a value of `y`; others count as `left_out`.

        The columns `step`, and `noise_sd` or else `mean_p_1mp`, `n_prompts`, `n_samples` (the noise of an
        evaluation) are used where they are present and complete. `price` is as for `from_record`.

        Raises:
            InputError: a column is missing or not numeric, or a value is out of range.
        """
        x, y = str(x), str(y)  # columns may be called by numbers
        # A column of dollars in the frame is what was paid, and needs no price.
        paid = x == "dollars" and x not in frame.columns
        rate_N = numbers_in(frame, y)
        kept_N = ~np.isnan(rate_N)
        compute_R = numbers_in(frame, "gpu_hours" if paid else x)
        compute_N = compute_R[kept_N]
        step_R = numbers_in(frame, "step") if "step" in frame.columns else np.full(len(frame), np.nan)
        known = {name: _known(frame, name, kept_N) for name in ("step", *NOISE_FIELDS)}
        noise_sd_N, samples_N = noise_of(*(known[name] for name in NOISE_FIELDS), like_N=compute_N)
        if "noise_sd" in frame.columns:
            noise_sd_N = numbers_in(frame, "noise_sd")[kept_N]
        left_out = LeftOut.of_nan(kept_N, compute_R, step_R, y)
        points = cls(
            in_dollars(compute_N, price) if paid else compute_N,
            rate_N[kept_N],
            noise_sd_N,
            samples_N,
            known["step"],
            FRAME,
            x,
            np.flatnonzero(kept_N),
            left_out.sentences(),
            left_out,
            metric=Metric.of_column(y),
        )
        labels = {name: frame[name][kept_N].to_numpy() for name in LABELS if name in frame.columns}
        return with_doubts(warn_of_mixture(points, labels))

    @classmethod
    def from_record(cls, record: RunRecord, axis: str = "gpu_hours", price: float | None = None) -> Points:
        """Read the evaluations of a run on `axis`; `price` in dollars per GPU-hour for the axis `dollars`.

        Raises:
            InputError: the axis is unknown or its counters were not logged, or a value is out of range.
        """
        step_N = np.array([point.step for point in record.evals], dtype=float)
        compute_N = record.training_compute(axis, price)
        left_out = LeftOut.parse(record.config.get("left_out"))
        sentences = left_out.sentences()
        # The ending comes first: it makes every answer about the end of the run provisional.
        warnings = (*sentences[: bool(left_out.ending)], *record.warnings, *sentences)
        noise_sd_N = np.array([point.noise_sd for point in record.evals], dtype=float)
        between = None if np.isfinite(noise_sd_N).any() else noise_between(record)
        points = cls(
            compute_N,
            np.array([point.pass_rate for point in record.evals], dtype=float),
            noise_sd_N if between is None else np.full(len(record.evals), between),
            np.array([point.total_samples for point in record.evals], dtype=float),
            step_N,
            str(record.evals_file),
            axis,
            # A record that was cut short has more lines than evaluations: no line rather than a wrong one.
            np.array(record.lines) if len(record.lines) == len(record.evals) else None,
            (
                *dict.fromkeys(warnings),
                *(f"{record.evals_file}: {what}" for what in _doubts(record, between is not None)),
                *warnings_of(record.alarms, int(step_N.max(initial=0))),
            ),
            left_out,
            record.metric,
            "samples" if between is None else "prompts",
        )
        return with_doubts(points)


def place_on(axis: str, compute: float) -> str:
    """Return a place on an axis as messages print it: `step 22`, `21.8 GPU-hours`."""
    return f"step {compute:.0f}" if axis == "steps" else amount_text(axis, compute)


def _scale(rate_N: np.ndarray) -> str:
    """Return advice on how to scale pass rates that are above 1."""
    largest = rate_N.max(initial=0.0)
    if 2 < largest <= 100:
        return "looks like percent: add --percent (in Python, divide by 100)"
    return "expected [0, 1]; --max-reward scales rewards (in Python, divide by the largest)"


def _doubts(record: RunRecord, noise_measured: bool) -> list[str]:
    """Return warnings about evaluations that carry less information than their number suggests."""
    unknown = not noise_measured and any(point.n_samples == 1 for point in record.evals)
    found = [ONE_SAMPLE] if unknown else []
    # `max` among NaN depends on the order, and a foreign log has NaN wherever it counts no failures.
    worst = max(record.evals, key=lambda point: np.nan_to_num(point.failed), default=None)
    if worst is not None and worst.failed > MOST_FAILED:
        found.append(
            f"the verification of {worst.failed:.1%} of the completions failed at step {worst.step}; they "
            "count as not correct, and lower the pass rate"
        )
    return found


def with_doubts(points: Points) -> Points:
    """Return the points, with warnings if the metric may be no pass rate or rows may be duplicates."""
    doubt = [f"{points.source}: {points.metric.doubt}"] if points.metric.doubt else []
    # Reported, not dropped: two true evaluations can agree, as pass rates are multiples of 1 / (n k).
    order_N = np.lexsort((points.pass_rate_N, points.compute_N))
    columns = points.compute_N[order_N], points.pass_rate_N[order_N]
    if repeats := int(np.count_nonzero(np.all(np.diff(columns) == 0, axis=0))):
        have = f"{counted(repeats, 'evaluation')} {'has' if repeats == 1 else 'have'}"
        doubt.append(
            f"{points.source}: {have} the compute and the pass rate of another; counted as repeated "
            "evaluations, so leave out rows that the log holds twice"
        )
    return replace(points, warnings=(*points.warnings, *doubt)) if doubt else points


def warn_of_mixture(points: Points, label_of: Mapping[str, Any]) -> Points:
    """Return the points of a table, with a warning if they may mix several runs or data sets.

    `points` are in the order of the rows. `label_of` maps the name of every column that tells runs or data
    sets apart to its cells (N,).

    Raises:
        InputError: the compute is a time of day, as trackers log it, or the rows have several metrics.
    """
    _check_is_no_clock(points)
    found = _alternating(points, label_of) or _disorder(points)
    return replace(points, warnings=(*points.warnings, f"{points.source}{found}")) if found else points


def _check_is_no_clock(points: Points) -> None:
    c_N, fault = points.compute_N, "is a time of day: expected what was spent since the start, such as hours"
    if points.axis not in AXES and len(points) > 1 and c_N.min() > max(_CLOCK, 0.9 * c_N.max()):
        points._check(c_N > 0, c_N, points.axis, fault)


def _alternating(points: Points, label_of: Mapping[str, Any]) -> str:
    """Return a warning that names a column whose values alternate along the compute; else an empty string.
    Raise an InputError if that column is the metric."""
    for name, cells in label_of.items():
        if values := alternating(points.compute_N, [str(cell) for cell in cells]):
            if name == "metric":
                what = f"rows of several metrics ({listed(values, most=4)}), and a curve is of one"
                raise InputError(f"{points.source}: {what}: keep the rows of one")
            return (
                f": rows of several {name} ({listed(values, most=4)}) count as repeated evaluations of one "
                "run on one data set; if they are not, keep the rows of one"
            )
    return ""


def alternating(at_N: np.ndarray, labels: Sequence[str]) -> list[str]:
    """Return the distinct labels of rows if they alternate along `at_N`; else an empty list."""
    values = list(dict.fromkeys(labels))
    label_N = np.array(labels)
    label_N = label_N[np.lexsort((label_N, at_N))]
    # A restart or a change of the data set splits the compute in two: its labels do not alternate.
    return values if np.count_nonzero(label_N[1:] != label_N[:-1]) >= len(values) > 1 else []


def _disorder(points: Points) -> str:
    """Return a warning that names a row whose compute is not a total over one run; else an empty string."""
    c_N, step_N = points.compute_N, points.step_N
    if len(c_N) < 2:
        return ""
    if step_N is not None and np.array_equal(step_N, c_N):
        step_N = None  # the axis is steps
    if step_N is not None:
        order_N = np.lexsort((c_N, step_N))
        back_N = np.diff(c_N[order_N]) < 0
    else:
        order_N = np.arange(len(c_N)) if c_N[-1] >= c_N[0] else np.arange(len(c_N))[::-1]
        # A single row that comes late is from an evaluator beside the run; a second run has more of them.
        below_N = c_N[order_N] < np.maximum.accumulate(c_N[order_N])
        rises_N = np.diff(c_N[order_N], append=-np.inf) > 0
        back_N = below_N[1:] & rises_N[1:] & np.append(below_N[2:], False)
    if not back_N.any():
        return ""
    i = int(np.argmax(back_N))
    before, at = order_N[i], order_N[i + 1]
    if step_N is None:
        what = f"{points.axis} {c_N[at]:.6g} comes after {c_N[before]:.6g}"
    else:
        at_step = f"at step {step_N[at]:g}"
        what = f"{points.axis} is {c_N[at]:.6g} {at_step}, but {c_N[before]:.6g} at step {step_N[before]:g}"
    word = "row" if points.source == FRAME else "line"
    line = at + 1 if points.line_N is None else int(points.line_N[at])
    return (
        f", {word} {line}: {what}; rows are fitted as those of one run, with the compute since its start: "
        "give totals, not the compute of a step, and one run only"
    )


def noise_of(
    mean_p_1mp_N: np.ndarray | None,
    n_prompts_N: np.ndarray | None,
    n_samples_N: np.ndarray | None,
    *,
    like_N: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampling noise sqrt(mean p(1-p) / (n k)), and n k; both (N,), NaN where unknown."""
    unknown_N = np.full(like_N.shape, np.nan)
    if n_prompts_N is None or n_samples_N is None:
        return unknown_N, unknown_N
    with np.errstate(over="ignore"):  # `Points` rejects an overflow, with its line
        total_N = np.where((n_prompts_N > 0) & (n_samples_N > 0), n_prompts_N * n_samples_N, np.nan)
    if mean_p_1mp_N is None:
        return unknown_N, total_N
    # At one sample per prompt p (1 - p) cannot be estimated, whatever the column says.
    return np.where(n_samples_N == 1, np.nan, np.sqrt(np.maximum(mean_p_1mp_N, 0) / total_N)), total_N


def _known(frame: Any, name: str, kept_N: np.ndarray) -> np.ndarray | None:
    """Return the kept rows of an optional column; None if it is missing or incomplete."""
    if name not in frame.columns:
        return None
    value_N = numbers_in(frame, name)[kept_N]
    return None if np.isnan(value_N).any() else value_N


def _spread(value: Any, what: str, like_N: np.ndarray) -> np.ndarray:
    """Spread one number over all points, unless there is one for each; None becomes NaN."""
    value_N = numbers_of(np.nan if value is None else value, what)
    return np.full(like_N.shape, value_N) if value_N.ndim == 0 else value_N
