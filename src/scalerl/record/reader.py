"""The seam between training and curve science: the run folder of docs/reference/run-folder.md, read.

A trainer writes it through `RunWriter`; everything that fits, compares or reports reads it through
`RunRecord`. Raw counters are stored, and the compute axis is chosen when reading (`RunRecord.compute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from scalerl._views import views
from scalerl.errors import InputError, NoEvaluationError, brief, counted, printable
from scalerl.files import as_path, reading
from scalerl.frames import data_frame, whole_numbers
from scalerl.jsonl import parse_jsonl, read_bytes, read_object, read_rows
from scalerl.numbers import as_float
from scalerl.record.activity import read_activity
from scalerl.record.alarms import Alarm, read_alarms
from scalerl.record.evaluation import AXES, COUNTERS, EvalPoint, check_axis, compute_of, in_dollars
from scalerl.record.folder import holds_run, name_of_path, why_no_run
from scalerl.record.metric import Metric
from scalerl.record.saved_weights import final_folder

SCHEMA = 1
UNTRAINED = ("checkpoint", "cluster", "engine", "health", "learner", "samples", "timeouts", "tracking")
"""The parts of a recipe that do not affect what is trained."""
_UNKNOWN = {"version": -1, "n_prompts": 0, "n_samples": 0}
"""The value of a whole number of an evaluation that is not known."""
_FIRST = ("step", "pass_rate", "noise_sd")
"""The first columns of a data frame."""
PASS_RATE_OF = "pass_rate/"
"""Prefix of the metric's name for one task of a mixture, or for a downstream suite."""


@dataclass(frozen=True, repr=False)
class RunRecord:
    """A run folder, read. `warnings` says what was skipped (an unfinished last line after a crash)."""

    path: Path
    config: dict[str, Any]
    evals: tuple[EvalPoint, ...]
    forecasts: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    """Line of every evaluation in its file, for errors; empty if they came from no file."""
    alarms: tuple[Alarm, ...] = ()
    """What was wrong with the run's health: alarms and warnings."""
    task: str = ""
    """The task of a mixture, or the suite, whose pass rates these are (`scalerl.record.prompts.of_task`)."""
    source_steps: Callable[[], Iterable[dict[str, Any]]] | None = field(default=None, compare=False)
    """Yields the lines of steps.jsonl of a run that was read from the log of another trainer."""
    step_columns: Mapping[str, np.ndarray] | None = field(default=None, compare=False)
    """What `columns` returns, once `with_columns` has read it."""

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read the run folder `path`.

        Raises:
            InputError: there is no such folder, it holds no evaluations, or a line cannot be read.
        """
        path = as_path(path)
        with reading(path):  # a folder may not be accessible, or a name be too long
            if not (path / "evals.jsonl").is_file():
                error = NoEvaluationError if holds_run(path) else InputError
                raise error(f"{path}: {why_no_run(path)}")
        record = cls.parse_evals(read_bytes(path / "evals.jsonl"), str(path / "evals.jsonl"))
        warnings = list(record.warnings)
        forecasts = tuple(read_rows(path / "forecasts.jsonl", warnings))
        alarms = read_alarms(path / "alarms.jsonl", warnings)
        return cls(path, _read_config(path), record.evals, forecasts, tuple(warnings), record.lines, alarms)

    @classmethod
    def parse_evals(cls, data: bytes, source: str) -> RunRecord:
        """Parse text in the form of evals.jsonl without a run folder; `source` names it in errors.

        Raises:
            InputError: a line cannot be read.
        """
        warnings: list[str] = []
        evals, lines = [], []
        for line, row in parse_jsonl(data, source, warnings):
            try:
                evals.append(EvalPoint.from_json(row))
            except InputError as error:
                raise InputError(f"{source}, line {line}: {error}") from error
            lines.append(line)
        return cls(Path(source), {}, tuple(evals), warnings=tuple(warnings), lines=tuple(lines))

    @property
    def trainers(self) -> int:
        """Number of training processes, from config.json; 1 where it does not say."""
        devices, recipe = (_table(self.config, name) for name in ("devices", "recipe"))
        found = devices.get("trainers", _table(recipe, "cluster").get("trainers"))
        # Anyone may have edited config.json: neither a non-number nor one below 1 may divide or multiply.
        return max(found, 1) if isinstance(found, int) else 1

    def devices(self, role: str, processes: int) -> float:
        """Return how many devices the `processes` of a role count as; roles are generate, train and evaluate.

        Records from before devices were counted do not say: there every process counts as one.
        """
        found = _table(_table(self.config, "devices"), "held").get(role)
        return found if isinstance(found, (int, float)) and 0 < found < math.inf else processes

    @property
    def evals_file(self) -> Path:
        """The file that the evaluations came from."""
        return self.path / "evals.jsonl" if self.path.is_dir() else self.path

    @property
    def name(self) -> str:
        """The printable name of the run: from config.json, else that of its folder or file."""
        named = self.config.get("name")
        return printable(str(named)) if named else name_of_path(self.path)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks of a mixture; empty for any other run."""
        return tuple(_table(_table(_table(self.config, "recipe"), "task"), "tasks"))

    @property
    def suites(self) -> tuple[str, ...]:
        """The names of the downstream suites in config.json; their lines are in downstream.jsonl."""
        found = _table(_table(self.config, "recipe"), "evaluation").get("downstream")
        tables = found if isinstance(found, list) else []
        return tuple(str(suite["name"]) for suite in tables if isinstance(suite, Mapping) and "name" in suite)

    @property
    def metric(self) -> Metric:
        """What the pass rates are: the metric of a log, or the pass rate on a task's held-out prompts."""
        if (read := Metric.parse(self.config.get("metric"))) is not None:
            return read
        task = _table(_table(self.config, "recipe"), "task")
        path = task.get("heldout_path") or task.get("path")
        of_task = printable(Path(str(path)).stem if path else str(task.get("kind", "")))
        last = max(self.evals, key=lambda point: point.step, default=EvalPoint(0, 0.0))
        return Metric(
            f"{PASS_RATE_OF}{self.task}" if self.task else "pass_rate",
            dataset=self.task or of_task,
            n_prompts=last.n_prompts,
            n_samples=last.n_samples,
            others=()
            if self.task
            else tuple(f"{PASS_RATE_OF}{name}" for name in (*self.tasks, *self.suites)),
        )

    @property
    def default_axis(self) -> str:
        """The axis of the run's budget, if config.json names one that was logged; else the first logged."""
        named = _table(self.config, "budget").get("kind")
        logged = self.logged_axes()
        return named if named in logged else logged[0]

    @property
    def has_ended(self) -> bool:
        """Whether the final weights are there or, as in a copy without checkpoints, the budget is spent."""
        if final_folder(self.path).is_dir():
            return True
        budget = _table(self.config, "budget")
        # A trainer that still has to write the weights has a progress.json.
        if budget.get("kind") not in self.logged_axes() or read_activity(self.path) is not None:
            return False
        return float(self.compute(budget["kind"]).max(initial=0.0)) >= as_float(budget.get("amount"))

    @property
    def health_is_watched(self) -> bool:
        """Whether the run's trainer looks for alarms: ours does, by the thresholds of a recipe.

        Whether other runs had any is not known, above all for those read from logs.
        """
        has_thresholds = isinstance(_table(self.config, "recipe").get("health"), Mapping)
        return has_thresholds or bool(self.alarms)

    def logged_axes(self) -> tuple[str, ...]:
        """Return the axes whose counters every evaluation has, except `dollars`, which needs a price."""
        return tuple(axis for axis in AXES if axis != "dollars" and not np.isnan(self._axis(axis)).any())

    def steps(self) -> list[dict[str, Any]]:
        """Read the lines of steps.jsonl, which are many for a long run."""
        if self.source_steps is not None:
            return list(self.source_steps())
        return read_rows(self.path / "steps.jsonl", [])

    def columns(self) -> Mapping[str, np.ndarray]:
        """Return the numbers of all trainer steps by name, shape (N,): NaN for a step without a number.

        A name under which no step has a finite number is left out.
        """
        if self.step_columns is not None:
            return self.step_columns
        rows, found = self.steps(), {}
        for name in dict.fromkeys(name for row in rows for name in row):
            cells = [row.get(name) for row in rows]
            value_N = np.array([as_float(cell) for cell in cells])
            # Booleans are numbers in Python.
            if np.isfinite(value_N).any() and any(type(cell) in (int, float) for cell in cells):
                found[name] = value_N
        return found

    def with_columns(self) -> Self:
        """Return the record with its `columns` in memory, so that steps.jsonl is read once.

        Raises:
            InputError: a line of steps.jsonl cannot be read.
        """
        # Of a log all columns are in memory already.
        return self if self.source_steps is not None else replace(self, step_columns=self.columns())

    def lost(self) -> list[dict[str, Any]]:
        """Read what each resume discarded: {"resumed": Unix seconds, "lost": {"steps", ...}}."""
        return [row for row in read_rows(self.path / "lost.jsonl", []) if "lost" in row]

    def samples(self) -> list[dict[str, Any]]:
        """Read the completions that were kept as text: the lines of samples.jsonl."""
        return read_rows(self.path / "samples.jsonl", [])

    def downstream(self) -> list[dict[str, Any]]:
        """Read the lines of downstream.jsonl: evaluations of suites (docs/reference/run-folder.md)."""
        return read_rows(self.path / "downstream.jsonl", [])

    def eval_prompts(self) -> list[dict[str, Any]]:
        """Read the lines of eval_prompts.jsonl: {"step", "prompt_set", "n", "id", "correct"}."""
        return read_rows(self.path / "eval_prompts.jsonl", [])

    def compute(self, axis: str = "gpu_hours", price: float | None = None) -> np.ndarray:
        """Return the training compute up to every evaluation, shape (n,), in units of `axis`.

        gpu_hours = (generate + train + idle device-seconds) / 3600; evaluation is left out. `price` is in
        dollars per GPU-hour, for the axis `dollars`.

        Raises:
            InputError: the axis is unknown, its counters were not logged, or `price` is missing or not
                above 0.
        """
        check_axis(axis)
        compute = self._axis(axis)
        if np.isnan(compute).any():
            what = f"the counters behind the axis '{axis}' are missing"
            if axis == "gpu_hours":
                what = "this log has no times of steps, so no GPU-hours"
            raise InputError(f"{self.evals_file}: {what}: use --x {' or '.join(self.logged_axes())}")
        return in_dollars(compute, price) if axis == "dollars" else compute

    def training_compute(self, axis: str, price: float | None = None) -> np.ndarray:
        """Return `compute` as it is fitted: 0 at step 0, as devices that are starting up train nothing."""
        step_N = np.array([point.step for point in self.evals])
        # Devices idle before the first step, which would put the untrained model at a compute above 0.
        return np.where(step_N == 0, 0.0, self.compute(axis, price))

    def to_frame(self) -> Any:
        """Return the evaluations as a `pandas.DataFrame`, one row each; NaN or NA for what was not logged.

        Columns: `step`, `pass_rate`, `noise_sd`, the axes `gpu_hours`, `flops`, `tokens`, `tokens_processed`,
        `samples` as they are fitted, and the other fields of `EvalPoint`. `scalerl.fit` accepts the frame.

        Raises:
            InputError: pandas is not installed.
        """
        unknown_N, logged = np.full(len(self.evals), np.nan), self.logged_axes()
        axes = {
            axis: self.training_compute(axis) if axis in logged else unknown_N
            for axis in ("gpu_hours", "flops", "tokens", "tokens_processed", "samples")
        }
        names = [f.name for f in fields(EvalPoint) if f.name not in (*COUNTERS, *_FIRST, *axes)]
        columns: dict[str, Any] = {
            name: [getattr(point, name) for point in self.evals] for name in (*_FIRST, *names)
        }
        for name, unknown in _UNKNOWN.items():
            columns[name] = whole_numbers([None if n == unknown else n for n in columns[name]])
        return data_frame({name: columns.pop(name) for name in _FIRST} | axes | columns)

    def __repr__(self) -> str:
        """Return one line, as a whole record would be thousands of numbers."""
        parts = [f"RunRecord {brief(self.name)}", counted(len(self.evals), "evaluation")]
        if self.evals:
            first, last = self.evals[0], self.evals[-1]
            parts.append(
                f"steps {first.step} to {last.step}, pass rate {first.pass_rate:.3f} to {last.pass_rate:.3f}"
            )
            ends = ((axis, float(self.training_compute(axis).max())) for axis in self.logged_axes())
            parts.append(", ".join(f"{axis} to {end:.4g}" for axis, end in ends if axis != "steps"))
        return f"<{'; '.join(filter(None, [*parts, str(self.path)]))}>"

    def _repr_html_(self) -> str:
        return views().run_html(self)

    def _axis(self, axis: str) -> np.ndarray:
        return np.array([compute_of(point, axis) for point in self.evals], dtype=float)


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config = read_object(file) if file.is_file() else {}
    schema = config.get("schema", SCHEMA)
    if not isinstance(schema, int):
        raise InputError(f"{file}: 'schema' must be a whole number, found {schema!r}")
    # A newer schema may change the meaning of a field; older ones are read.
    if schema > SCHEMA:
        raise InputError(f"{file}: schema {schema} is newer than this scalerl reads ({SCHEMA})")
    return config
