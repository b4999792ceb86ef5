"""Evidence that generation and training overlapped: what was sampled across updates, and its age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl.view.numbers import as_float, as_mapping, percent, plain


def in_flight_rows(steps: Sequence[Mapping[str, Any]], recipe: Any = None) -> list[tuple[str, str]]:
    """Rows (label, value) from the lines of steps.jsonl; nothing where they hold no ages.

    Shares are means over all steps and over the last tenth of them. The largest age stands beside the
    one that the schedule of `recipe` allows.
    """
    shares = (
        ("completions sampled by two or more versions of the weights", "multi_version"),
        ("trained tokens older than 4 steps", "age_share_over_4"),
    )
    rows = []
    for label, key in shares:
        known_N = _known(steps, key)
        if known_N.size:
            late = known_N[-max(known_N.size // 10, 1) :].mean()
            rows.append((label, f"{percent(known_N.mean())}; in the last tenth of the run {percent(late)}"))
    age_N, cache_N = _known(steps, "age_max"), _known(steps, "kv_age_max")
    if age_N.size:
        schedule = as_mapping(as_mapping(recipe).get("schedule"))
        k = schedule.get("k")
        name = "k - 1" if schedule.get("kind") == "off_policy" else "k"
        bound = f"; the schedule allows {name} = {plain(k - (name != 'k'))}" if k is not None else ""
        rows.append(("largest age of a trained token", f"{plain(age_N.max())} steps{bound}"))
    if cache_N.size:
        rows.append(("largest age of an entry of a KV cache", f"{plain(cache_N.max())} steps"))
    return rows


def _known(steps: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    values_N = np.array([as_float(row.get(key)) for row in steps])
    return values_N[np.isfinite(values_N)]
