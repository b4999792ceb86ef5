"""Downstream suites of a run: benchmarks besides the held-out prompts, in downstream.jsonl.

A line is like one of evals.jsonl, with the name of the suite, the successes of every prompt, and

    pass_rate       pass@1: the mean over the prompts of the share of correct completions (mean@k)
    pass_at_k       share of the prompts with a correct completion among the k = `n_samples` of each
    ..._interval    its 95 % interval over similar prompts, by Wilson's method

Completions of one prompt are correlated, so that P prompts of k completions are worth fewer than P k
independent ones. The scatter between the prompts determines how many:

    n = p (1 - p) / (s^2 / P)        s the standard deviation of c_i / k over the prompts

(a design effect; Miller, arXiv 2411.00640, has the standard error). Where every completion is correct, or
none is, n is P.

Shapes: P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.record.evaluation import EvalPoint

_Z = 1.959964  # quantile of a 95 % interval

Span = tuple[float, float]


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite at one step, with the intervals of both rates."""

    suite: str
    step: int
    n_prompts: int
    n_samples: int
    pass_rate: float
    pass_rate_interval: Span
    pass_at_k: float
    pass_at_k_interval: Span

    @classmethod
    def of(cls, suite: str, step: int, correct_P: Sequence[int] | np.ndarray, n_samples: int) -> SuiteResult:
        """Return the rates, given the successes `correct_P` out of `n_samples` completions of each prompt."""
        share_P = np.asarray(correct_P) / n_samples
        solved_P = (share_P > 0).astype(float)
        return cls(
            suite,
            step,
            len(share_P),
            n_samples,
            float(share_P.mean()),
            _interval(share_P, n_samples),
            float(solved_P.mean()),
            _interval(solved_P, 1),
        )


def _interval(share_P: np.ndarray, n_samples: int) -> Span:
    """Return the 95 % interval of the mean over similar prompts."""
    n_prompts, p = len(share_P), float(share_P.mean())
    variance = float(np.var(share_P, ddof=1)) / n_prompts if n_prompts > 1 else math.inf
    most = n_prompts * n_samples
    n = min(max(p * (1 - p) / variance, 1.0), most) if variance else most
    if p in (0.0, 1.0):
        n = n_prompts
    centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def suite_row(
    suite: str, point: EvalPoint, prompt_set: str, prompt_ids: Sequence[str], correct_P: np.ndarray
) -> dict[str, Any]:
    """Return a line of downstream.jsonl."""
    found = SuiteResult.of(suite, point.step, correct_P, point.n_samples)
    return {
        "suite": suite,
        **asdict(point),
        "pass_rate_interval": found.pass_rate_interval,
        "pass_at_k": found.pass_at_k,
        "pass_at_k_interval": found.pass_at_k_interval,
        "prompt_set": prompt_set,
        "id": list(prompt_ids),
        "correct": [int(c) for c in correct_P],
    }


def last_of_each(rows: Iterable[dict[str, Any]]) -> dict[str, SuiteResult]:
    """Return the last result of every suite, in the order of their first lines; other lines are skipped."""
    found: dict[str, SuiteResult] = {}
    for row in rows:
        name, step, n, correct = (row.get(key) for key in ("suite", "step", "n_samples", "correct"))
        if not (isinstance(name, str) and isinstance(step, int) and isinstance(n, int) and n > 0):
            continue
        if isinstance(correct, list) and correct and all(isinstance(c, int) and 0 <= c <= n for c in correct):
            found[name] = SuiteResult.of(name, step, correct, n)
    return found
