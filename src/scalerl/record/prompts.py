"""How far sampling moves a run's pass rate from one evaluation to the next, measured prompt by prompt.

sqrt(mean p (1 - p) / (P k)) is the noise of completions that are sampled anew. If evaluations share their
random numbers (`evaluation.seed`), most of it is the same in all of them: the demonstration's pass rates
scatter by a third of it. The successes by prompt show how much, as prompts are independent given the weights:

    var(y_j - y_i) = var over prompts (c_j - c_i) / (P k^2) = 2 sd^2          i, j neighbours in the record

A prompt that has been learnt in between counts as noise too, so this is an upper bound as well. A fit uses it
at one completion a prompt, where nothing else is known. Where the number of completions is known it is not
used, although forecasts of evaluations would be narrower: what all evaluations share causes no scatter, but
moves the ceiling (`benchmarks/prompts.py`).

Shapes: P prompts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import InputError
from scalerl.files import reading
from scalerl.jsonl import object_of
from scalerl.record.evaluation import EvalPoint, mean_p_1mp
from scalerl.record.reader import RunRecord

FILE, DOWNSTREAM = "eval_prompts.jsonl", "downstream.jsonl"
_LEAST = 100  # least differences of prompts, over all neighbours: they determine the variance to a seventh


def noise_between(record: RunRecord) -> float | None:
    """Return the sampling noise by which evaluations differ, as the sd of one evaluation, in pass rate.

    None if eval_prompts.jsonl has fewer than a hundred differences of prompts.

    Raises:
        InputError: the file cannot be read.
    """
    variances: list[float] = []
    differences = 0
    before: tuple[Any, np.ndarray] | None = None
    task = record.task if record.task in record.tasks else ""
    for row in whole_rows(record, 1):
        key, correct_P = (row["prompt_set"], row["n"], row["id"]), successes_of(row, task) / row["n"]
        if before is not None and before[0] == key:
            variances.append(float(np.var(correct_P - before[1], ddof=1)) / len(correct_P) / 2)
            differences += len(correct_P)
        before = key, correct_P
    return float(np.sqrt(np.mean(variances))) if differences >= _LEAST else None


def of_task(record: RunRecord, name: str) -> RunRecord:
    """Return the run with the pass rates on one task of its mixture only, from the successes by prompt; or on
    a downstream suite, with the evaluations that had it.

    Raises:
        InputError: eval_prompts.jsonl cannot be read, or has no prompts of this task for some evaluation.
    """
    if name not in record.tasks and (
        rows := [row for row in record.downstream() if row.get("suite") == name]
    ):
        try:
            evals = tuple(map(EvalPoint.from_json, rows))
        except InputError as error:
            raise InputError(f"{record.path / DOWNSTREAM}: {error}") from error
        return replace(record, evals=evals, forecasts=(), lines=(), task=name)
    # These figures are for the evaluation as a whole.
    unknown = dict.fromkeys(("failed", "truncated", "interrupted", "mean_length", "entropy"), math.nan)
    narrowed = {}
    for row in whole_rows(record, 0):
        correct_P, n = successes_of(row, name), row["n"]
        if len(correct_P):
            narrowed[row["step"]] = {
                **unknown,
                "pass_rate": float(correct_P.mean()) / n,
                "n_prompts": len(correct_P),
                "mean_p_1mp": mean_p_1mp(correct_P, n),
            }
    if missing := [point.step for point in record.evals if point.step not in narrowed]:
        names = sorted((*record.tasks, *record.suites))
        which = f"; its tasks and suites are {', '.join(names)}" if names else ""
        raise InputError(f"{record.path / FILE}: no prompts of task {name!r} at step {missing[0]}{which}")
    evals = tuple(replace(point, **narrowed[point.step]) for point in record.evals)
    return replace(record, evals=evals, forecasts=(), task=name)


def successes_of(row: dict[str, Any], task: str = "") -> np.ndarray:
    """Return the successes of the prompts of a task, or of all, (P,)."""
    start = f"{task}/" if task else ""
    return np.array([n for id, n in zip(row["id"], row["correct"], strict=True) if str(id).startswith(start)])


def whole_rows(record: RunRecord, first: int) -> Iterator[dict[str, Any]]:
    """Yield one whole line (see `is_whole`) for every evaluation from step `first` on, as in the file."""
    suite = record.task if record.task and record.task not in record.tasks else None
    path = record.path / (FILE if suite is None else DOWNSTREAM)
    left = {point.step for point in record.evals if point.step >= first}
    with reading(path):
        if not path.is_file() or path.stat().st_size > limits.WHOLE.most:
            return
        with path.open("rb") as file:
            # A line at a time: as objects, the file of a long run on many prompts takes ten times its size.
            while line := file.readline(limits.ROW.most):
                row = object_of(line)
                if suite is not None:
                    row = {**row, "n": row.get("n_samples")} if row.get("suite") == suite else {}
                if is_whole(row) and row["step"] in left:
                    left.discard(row["step"])
                    yield row


def is_whole(row: Mapping[str, Any]) -> bool:
    """Return whether a line has the successes of two prompts or more, each within the completions drawn."""
    n, ids, correct = row.get("n"), row.get("id"), row.get("correct")
    if not (isinstance(row.get("step"), int) and isinstance(n, int) and isinstance(ids, list)):
        return False
    if not isinstance(correct, list) or not 2 <= len(correct) == len(ids) or "prompt_set" not in row:
        return False
    return all(isinstance(value, int) and 0 <= value <= n for value in correct) and n > 0
