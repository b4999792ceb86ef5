"""Two recipes on the same held-out prompts: the difference of their pass rates, prompt by prompt.

Curves answer "on these prompts": the choice of prompts moves all runs alike, and is not part of their noise.
The standard error over prompts answers "on other prompts of this kind", for these runs. Pairing by prompt
makes it smaller, as prompts that are hard for one recipe are hard for the other.

Shapes: P prompts, R runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.record.prompts import FILE, whole_rows
from scalerl.record.reader import RunRecord


@dataclass(frozen=True)
class PairedPrompts:
    """Recipe less base on `n_prompts` common prompts, near the last common compute.

    Every run enters with its evaluation nearest to `matched_at`, the smallest last compute of all runs.
    `base_compute` and `recipe_compute` are the computes of those evaluations, averaged over runs. The pass
    rate of a prompt is the mean over the runs of a recipe.
    """

    prompt_set: str
    n_prompts: int
    matched_at: float
    base_compute: float
    recipe_compute: float
    difference: float
    se: float
    """Standard error over prompts, paired."""
    se_unpaired: float
    tasks: Mapping[str, PairedPrompts] = field(default_factory=dict)
    """Differences on each task of a mixture that all runs have, by task name."""

    def __str__(self) -> str:
        return (
            f"{self.difference:+.4f} +- {self.se:.4f} over {self.n_prompts} prompts, paired "
            f"(unpaired +- {self.se_unpaired:.4f}), at {self.base_compute:.4g} -> {self.recipe_compute:.4g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields; `tasks` only if there are any."""
        found = {name: value for name, value in vars(self).items() if name != "tasks"}
        if self.tasks:
            found["tasks"] = {name: one.to_json() for name, one in self.tasks.items()}
        return found


def paired_prompts(
    base: Sequence[RunRecord],
    recipe: Sequence[RunRecord],
    axis: str = "gpu_hours",
    price: float | None = None,
) -> PairedPrompts | None:
    """Compare the runs of two recipes on common prompts; None if they have no prompt set in common.

    Raises:
        InputError: the axis is unknown or its counters are missing, or one set has other prompts in two runs.
    """
    runs = [*base, *recipe]
    rows = [list(whole_rows(run, 0)) for run in runs]
    common = set.intersection(*({row["prompt_set"] for row in of_run} for of_run in rows))
    shared = [row["prompt_set"] for row in rows[0] if row["prompt_set"] in common]
    if not shared:
        return None
    # The latest of several: the prompts may have changed between runs, or within one.
    prompt_set = shared[-1]
    computes = [
        {point.step: float(c) for point, c in zip(run.evals, run.compute(axis, price), strict=True)}
        for run in runs
    ]
    # As far as the shortest run goes: beyond it a difference would be one of compute.
    at = min(max(compute.values()) for compute in computes)
    nearest = [_nearest(*of_run, prompt_set, at) for of_run in zip(rows, computes, strict=True)]
    if runs[0].task in runs[0].tasks:
        start = f"{runs[0].task}/"
        nearest = [(c, {i: p for i, p in rates.items() if i.startswith(start)}) for c, rates in nearest]
    # By id, as runs may list the same prompts in another order.
    ids = sorted(nearest[0][1])
    for run, (_, rates) in zip(runs, nearest, strict=True):
        if sorted(rates) != ids:
            raise InputError(f"{run.path / FILE}: set {prompt_set} has other prompts than in {runs[0].path}")
    rate_RP = np.array([[rates[i] for i in ids] for _, rates in nearest])
    where = [compute for compute, _ in nearest]
    whole = PairedPrompts(
        prompt_set=str(prompt_set),
        n_prompts=len(ids),
        matched_at=at,
        base_compute=float(np.mean(where[: len(base)])),
        recipe_compute=float(np.mean(where[len(base) :])),
        **_difference(rate_RP, len(base)),
    )
    tasks = {}
    for name in runs[0].tasks:
        own_P = np.array([i.startswith(f"{name}/") for i in ids])
        if own_P.sum() > 1 and not runs[0].task and all(name in run.tasks for run in runs):
            own = _difference(rate_RP[:, own_P], len(base))
            tasks[name] = replace(whole, n_prompts=int(own_P.sum()), **own)
    return replace(whole, tasks=tasks)


def _difference(rate_RP: np.ndarray, n_base: int) -> dict[str, Any]:
    """Return the difference over some prompts and its standard errors; the base's runs come first."""
    base_P, recipe_P = rate_RP[:n_base].mean(axis=0), rate_RP[n_base:].mean(axis=0)
    root = np.sqrt(len(base_P))
    return {
        "difference": float(np.mean(recipe_P - base_P)),
        "se": float(np.std(recipe_P - base_P, ddof=1) / root),
        "se_unpaired": float(np.hypot(base_P.std(ddof=1), recipe_P.std(ddof=1)) / root),
    }


def _nearest(
    rows: list[dict[str, Any]], computes: dict[int, float], prompt_set: Any, at: float
) -> tuple[float, dict[str, float]]:
    """Return the compute, and every prompt's pass rate, of the evaluation on a set nearest to `at`."""
    usable = (row for row in rows if row["prompt_set"] == prompt_set)
    row = min(usable, key=lambda row: abs(computes[row["step"]] - at))
    return computes[row["step"]], {
        str(i): c / row["n"] for i, c in zip(row["id"], row["correct"], strict=True)
    }
