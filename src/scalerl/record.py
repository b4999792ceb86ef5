"""The seam between training and curve science: a run is a folder of JSON files.

    NAME/
      config.json         schema version, resolved recipe, seed, versions, devices; written once
      evals.jsonl         one line per evaluation (`EvalPoint`)
      eval_prompts.jsonl  the successes of every held-out prompt at every evaluation
      steps.jsonl         one line per trainer step
      forecasts.jsonl     every forecast made during the run, frozen when written
      checkpoints/        what a resume needs, or the final weights
      report.html         made from the files above, never read back

A trainer writes it through `RunWriter`; everything that fits, compares or reports reads it through
`RunRecord`. Raw counters are stored, and the compute axis is chosen when reading (`RunRecord.compute`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import InputError, WriteError

SCHEMA = 1

AXES = ("gpu_hours", "flops", "tokens", "samples", "steps", "dollars")
"""The compute axes: device-hours of generating, training and idling; floating-point operations; tokens
generated and trained; completions; trainer steps; and GPU-hours times a price."""


@dataclass(frozen=True)
class DeviceSeconds:
    """Cumulative device-seconds by role. `evaluate` is recorded and is no part of training compute."""

    generate: float = math.nan
    train: float = math.nan
    evaluate: float = math.nan
    idle: float = math.nan


@dataclass(frozen=True)
class Flops:
    """Cumulative floating-point operations by role."""

    generate: float = math.nan
    train: float = math.nan


@dataclass(frozen=True)
class Tokens:
    """Cumulative tokens by role: sampled by the generators, and trained on."""

    generated: float = math.nan
    trained: float = math.nan


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on the held-out prompts, with the cumulative counters at which it was made.

    A counter or a health figure that the trainer did not log is NaN. Shares are in [0, 1], lengths in
    tokens, entropy in nats per token.
    """

    step: int
    pass_rate: float
    """Mean over the held-out prompts of the share of their completions that are correct (mean@k)."""
    time: float = math.nan
    """Unix seconds."""
    device_seconds: DeviceSeconds = field(default_factory=DeviceSeconds)
    flops: Flops = field(default_factory=Flops)
    tokens: Tokens = field(default_factory=Tokens)
    samples: float = math.nan
    """Completions consumed by the trainer."""
    prompts: float = math.nan
    """Groups consumed by the trainer."""
    version: int = -1
    """Version of the weights that sampled every completion of this evaluation; -1 when not known."""
    n_prompts: int = 0
    n_samples: int = 0
    """Completions per held-out prompt."""
    mean_p_1mp: float = math.nan
    """Unbiased estimate of the mean over prompts of p (1 - p); NaN at one sample per prompt."""
    truncated: float = math.nan
    interrupted: float = math.nan
    mean_length: float = math.nan
    entropy: float = math.nan

    @property
    def noise_sd(self) -> float:
        """Sampling noise of `pass_rate` on fixed prompts, sqrt(mean p(1-p) / (n k)); NaN when not known."""
        total = self.n_prompts * self.n_samples
        return math.sqrt(max(self.mean_p_1mp, 0.0) / total) if total else math.nan

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> EvalPoint:
        """Build a point from one parsed line of evals.jsonl; unknown keys are passed over."""
        nested = {"device_seconds": DeviceSeconds, "flops": Flops, "tokens": Tokens}
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in row.items():
            if key in nested:
                values[key] = nested[key](**_numbers(value))
            elif key in known:
                values[key] = math.nan if value is None else value
        return cls(**values)


def mean_p_1mp(correct_P: np.ndarray, n_samples: int) -> float:
    """Unbiased estimate of the mean over prompts of p (1 - p), `correct_P` successes of `n_samples` each.

    For x successes of k, x (k - x) / (k (k - 1)) has expectation p (1 - p). NaN at k = 1, where one sample
    says nothing of the spread.
    """
    if n_samples < 2:
        return math.nan
    return float(np.mean(correct_P * (n_samples - correct_P)) / (n_samples * (n_samples - 1)))


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read. `warnings` says what was passed over (an unfinished last line after a crash)."""

    path: Path
    config: dict[str, Any]
    evals: tuple[EvalPoint, ...]
    forecasts: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read the run folder `path`.

        Raises:
            InputError: there is no such folder, it holds no evaluations, or a line cannot be read.
        """
        path = Path(path)
        if not (path / "evals.jsonl").is_file():
            what = "holds no evals.jsonl, so it is no run folder" if path.is_dir() else "no such run folder"
            raise InputError(f"{path}: {what}")
        warnings: list[str] = []
        evals = _read_evals(path / "evals.jsonl", warnings)
        forecasts = _read_rows(path / "forecasts.jsonl", warnings)
        return cls(path, _read_config(path), evals, tuple(forecasts), tuple(warnings))

    @classmethod
    def read_evals(cls, file: str | Path) -> RunRecord:
        """Read one file in the form of evals.jsonl that stands alone, without the folder.

        Raises:
            InputError: there is no such file, or a line of it cannot be read.
        """
        warnings: list[str] = []
        evals = _read_evals(Path(file), warnings)
        return cls(Path(file), {}, evals, warnings=tuple(warnings))

    @property
    def evals_file(self) -> Path:
        """The file that the evaluations came from."""
        return self.path if self.path.is_file() else self.path / "evals.jsonl"

    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps.jsonl, read on demand (a long run has many)."""
        return _read_rows(self.path / "steps.jsonl", [])

    def eval_prompts(self) -> list[dict[str, Any]]:
        """The lines of eval_prompts.jsonl, read on demand: {"step", "prompt_set", "n", "id", "correct"}."""
        return _read_rows(self.path / "eval_prompts.jsonl", [])

    def compute(self, axis: str = "gpu_hours", price: float | None = None) -> np.ndarray:
        """Cumulative training compute of every evaluation, shape (n,), in units of `axis`.

        gpu_hours = (generate + train + idle device-seconds) / 3600; evaluation is left out. `price` is in
        dollars per GPU-hour, and belongs to the axis `dollars`.

        Raises:
            InputError: the axis is unknown, its counters were not logged, or `price` is missing.
        """
        if axis not in AXES:
            raise InputError(f"unknown compute axis {axis!r}: choose one of {', '.join(AXES)}")
        if axis == "dollars" and price is None:
            raise InputError("the axis 'dollars' needs a price per GPU-hour")
        compute = np.array([_axis_value(point, axis) for point in self.evals], dtype=float)
        if axis == "dollars":
            compute *= price or 0.0
        if not np.isfinite(compute).all():
            raise InputError(f"{self.evals_file}: the counters behind the axis '{axis}' are missing")
        return compute


def _axis_value(point: EvalPoint, axis: str) -> float:
    if axis in ("gpu_hours", "dollars"):
        seconds = point.device_seconds
        return (seconds.generate + seconds.train + seconds.idle) / 3600
    if axis == "flops":
        return point.flops.generate + point.flops.train
    if axis == "tokens":
        return point.tokens.generated + point.tokens.trained
    return float(point.samples if axis == "samples" else point.step)


class RunWriter:
    """Writes a run folder, one whole line at a time; no other code writes there.

    Evaluations and forecasts are synced to the disk as they are written, steps are flushed.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        """Create the folder `path` and write config.json.

        Raises:
            InputError: the folder exists already and is not empty.
            WriteError: the disk does not take it.
        """
        self.path = Path(path)
        check_unused(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "config.json", dumps({"schema": SCHEMA, **config}, indent=2) + "\n")
        except OSError as error:
            raise _write_error(self.path, error) from error

    def evaluation(
        self, point: EvalPoint, prompt_set: str, prompt_ids: Sequence[str], correct_P: np.ndarray
    ) -> None:
        """Append one evaluation, and the successes `correct_P` of each of its prompts."""
        successes = {
            "step": point.step,
            "prompt_set": prompt_set,
            "n": point.n_samples,
            "id": list(prompt_ids),
            "correct": [int(c) for c in correct_P],
        }
        # The prompts first: an evaluation that is on record has its successes on record.
        self._append("eval_prompts.jsonl", successes)
        self._append("evals.jsonl", asdict(point), sync=True)

    def step(self, row: Mapping[str, Any]) -> None:
        """Append one trainer step."""
        self._append("steps.jsonl", row)

    def forecast(self, row: Mapping[str, Any]) -> None:
        """Append one forecast; it is on the disk when this returns, and is never changed."""
        self._append("forecasts.jsonl", row, sync=True)

    def _append(self, name: str, row: Mapping[str, Any], sync: bool = False) -> None:
        line = (dumps(row) + "\n").encode()
        path = self.path / name
        try:
            with path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    if file.write(line) != len(line):
                        raise OSError(28, os.strerror(28))
                    if sync:
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(before)  # no torn line stays behind a full disk
                    raise
        except OSError as error:
            raise _write_error(path, error) from error


def check_unused(folder: Path) -> None:
    """Raise InputError if `folder` cannot become a new run: it is a file, or holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: choose another folder with -o, or remove it")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all: aside, synced, then renamed."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON text with NaN and infinities as null, as RFC 8259 knows neither."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object of counters, found {value!r}")
    return {str(k): math.nan if v is None else float(v) for k, v in value.items()}


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: expected one JSON object")
    if not isinstance(config.get("schema", SCHEMA), int):
        raise InputError(f"{file}: 'schema' is a whole number, found {config['schema']!r}")
    if config.get("schema", SCHEMA) > SCHEMA:
        raise InputError(f"{file}: schema {config['schema']} is newer than this scalerl reads ({SCHEMA})")
    return config


def _read_evals(file: Path, warnings: list[str]) -> tuple[EvalPoint, ...]:
    evals = []
    for number, row in read_jsonl(file, warnings):
        where = f"{file}, line {number}"
        if not isinstance(row.get("pass_rate"), int | float) or not isinstance(row.get("step"), int):
            raise InputError(f"{where}: an evaluation needs a whole 'step' and a numeric 'pass_rate'")
        try:
            evals.append(EvalPoint.from_json(row))
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {error}") from error
    return tuple(evals)


def _read_rows(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path, warnings)] if path.is_file() else []


def read_jsonl(path: Path, warnings: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; an unfinished last line goes to `warnings`.

    Raises:
        InputError: the file cannot be read, or a line that is not the last is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer was cut off
                warnings.append(f"{path}: the last line is unfinished (a crash while writing); left out")
                continue
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected one JSON object")
        rows.append((number, row))
    return rows


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path}: {error.strerror or error}; what was written before is kept")
