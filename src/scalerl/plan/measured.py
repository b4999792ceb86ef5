"""Rates as a run has shown them: from its steps.jsonl.

Shapes in names: F features of a decode step (1, rows, prompt tokens read, positions attended), S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.plan.lengths import Lengths
from scalerl.plan.rates import (
    Decode,
    DriverRates,
    EvaluateRates,
    Machine,
    Prefill,
    Rates,
    Trainer,
    Verify,
    Weights,
)
from scalerl.record.reader import RunRecord

LEAST_STEPS = 5
"""Of which rates are made."""
_WARM_UP = 0.25
"""Share of the steps that are left out: the first ones fill the pipeline, and caches."""
_CLEAR = 2.0
"""Standard errors by which a step must take longer per token before its time is split."""


def rates_of(record: RunRecord) -> Rates:
    """The rates of a run of `scalerl train`, over the steps after its first quarter.

    Where generators and trainer shared the cores of one machine (placement `local`, without a GPU) seconds
    are CPU seconds, and `machine` says how many cores there were. Decode steps are fitted by least squares,
    with no coefficient below 0. What a run always did alike it does not show: where all rows were always in
    use, what a step takes by itself and by the row are not apart.

    Raises:
        InputError: it has too few steps, or was recorded without `pace`.
    """
    rows, cores, trainers = _rows(record), _cores(record), record.trainers
    spent = _by_cpu(rows) if cores else _by_clock(rows, trainers)
    first, last, counted = rows[0], rows[-1], rows[1:]
    completions = sum(row["completions"] for row in counted)
    groups = sum(row["groups"] for row in counted)
    used = max(sum(row["groups_used"] for row in counted) / groups, 1e-3)
    lengths = _lengths(counted)
    decoded = completions * float(np.mean((lengths.quantiles[1:] + np.array(lengths.quantiles[:-1])) / 2))
    trained = _difference(first, last, "tokens", "trained")
    fixed, token, micro = _trainer(rows, spent.train_S, trainers, _passes(record, rows))
    installs = _difference(first, last, "pace", "installs")
    base, row, prompt, position = spent.decode_F.tolist()
    return Rates(
        decode=Decode(max(base, 1e-9), row, position, spent.messages / groups),
        prefill=Prefill(prompt),
        # The tokens of the simulation are those decoded of the groups that are used.
        trainer=Trainer(token * trained / max(used * decoded, 1.0), fixed, used, micro),
        lengths=lengths,
        verify=Verify(spent.verify / completions),
        driver=DriverRates(
            completion=spent.hear / completions,
            group=spent.admit / groups,
            step=max(spent.record, 0.0) / len(counted),
        ),
        weights=Weights(
            publish=spent.publish / len(counted), install=spent.install / installs if installs else 0.0
        ),
        evaluate=EvaluateRates(last["device_seconds"]["evaluate"] / max(len(record.evals), 1)),
        machine=Machine(cores) if cores else Machine(),
        source=f"measured in {record.name}, steps {first['step'] + 1} to {last['step']}",
    )


@dataclass(frozen=True)
class _Spent:
    """Seconds of some steps; those of a decode step by what it does."""

    decode_F: np.ndarray
    train_S: np.ndarray
    install: float
    verify: float
    record: float
    hear: float = 0.0
    admit: float = 0.0
    publish: float = 0.0
    messages: float = 0.0
    """Of the generators, beside decode steps."""


def _by_clock(rows: Sequence[Mapping[str, Any]], trainers: int) -> _Spent:
    """What the driver did, and when it was not waiting, is all in `record`."""
    first, last = rows[0], rows[-1]
    train_S = np.array([_difference(a, b, "device_seconds", "train") for a, b in pairwise(rows)]) / trainers
    verify = _difference(first, last, "pace", "verify_seconds")
    hidden = sum(
        end["pace"].get("verify_hidden_seconds", 0.0) * sign for end, sign in ((last, 1), (first, -1))
    )
    waited = _difference(first, last, "idle_seconds", "train") / trainers
    return _Spent(
        _decode(_matrix(last) - _matrix(first)),
        train_S,
        _difference(first, last, "pace", "install_seconds"),
        verify + hidden,
        _passed(rows) - waited - float(train_S.sum()) - verify,
    )


def _passed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds between the rows, but for those between which processes were started: a resumed run may
    have stood still for days."""
    started_S = [row["device_seconds"].get("startup") for row in rows]
    between = zip(pairwise(rows), pairwise(started_S), strict=True)
    return sum(b["time"] - a["time"] for (a, b), (before, after) in between if before == after)


def _by_cpu(rows: Sequence[Mapping[str, Any]]) -> _Spent:
    paces = [row["pace"] for row in rows]
    first, last = paces[0], paces[-1]
    total = {what: last["cpu"][what] - first["cpu"][what] for what in last["cpu"]}
    sum_FF = _matrix(rows[-1]) - _matrix(rows[0])
    sum_FF[:4, 4] = np.subtract(last["decode_cpu"], first["decode_cpu"])
    decode_F = _decode(sum_FF)
    # What goes on between two decode steps, beside messages, is a part of them.
    between = total["generate"] - total["messages"] - total["install"] - sum_FF[0, 4]
    decode_F[0] += between / sum_FF[0, 0]
    return _Spent(
        decode_F,
        np.array([b["cpu"]["train"] - a["cpu"]["train"] for a, b in pairwise(paces)]),
        *(total[what] for what in ("install", "verify", "record", "hear", "admit", "publish", "messages")),
    )


def evaluated_every(record: RunRecord) -> float | None:
    """Steps from one evaluation of a run to the next, on average; None where there are too few."""
    steps = [point.step for point in record.evals]
    return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 and steps[-1] > steps[0] else None


def _rows(record: RunRecord) -> list[dict[str, Any]]:
    rows = record.steps()
    rows = rows[int(len(rows) * _WARM_UP) :]
    path = record.path / "steps.jsonl"
    if len(rows) <= LEAST_STEPS:
        raise InputError(f"{path}: rates need {LEAST_STEPS} steps after the first quarter; there are fewer")
    try:
        steps = [_matrix(row)[0, 0] for row in rows]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}: a step has no 'pace', which scalerl train records; train it anew"
        ) from None
    if not steps[-1] > steps[0]:
        raise InputError(
            f"{path}: no decode steps are on record (vLLM does not tell of them): name others with --rates"
        )
    return rows


def _matrix(row: Mapping[str, Any]) -> np.ndarray:
    """The sums of products of `pace.decode`, whose upper triangle is on record: (5, 5)."""
    upper = np.zeros((5, 5))
    upper[np.triu_indices(5)] = row["pace"]["decode"]
    return upper + np.triu(upper, 1).T


def _decode(sum_FF: np.ndarray) -> np.ndarray:
    """Seconds of a decode step by feature (4), from the sums of products with the seconds as the fifth."""
    scale_F = np.sqrt(np.diag(sum_FF)[:4])
    kept = [i for i in range(4) if scale_F[i] > 0]
    found_F = np.zeros(4)
    while kept:
        normal = sum_FF[np.ix_(kept, kept)] / np.outer(scale_F[kept], scale_F[kept])
        solved = np.linalg.lstsq(normal, sum_FF[kept, 4] / scale_F[kept], rcond=1e-9)[0]
        if (solved >= 0).all():
            found_F[kept] = solved / scale_F[kept]
            break
        kept.pop(int(np.argmin(solved)))
    return found_F


def _trainer(
    rows: Sequence[Mapping[str, Any]], second_S: np.ndarray, trainers: int, pass_S: np.ndarray
) -> tuple[float, float, float]:
    """Seconds of a step by itself, for each token of a trainer, and for each of its passes over a
    micro-batch, from those of every step; without the last, or all by the token, where the steps do not tell
    these apart."""
    token_S = np.array([_difference(a, b, "tokens", "trained") for a, b in pairwise(rows)]) / trainers
    if np.ptp(pass_S):
        one_SF = np.stack([np.ones_like(token_S), token_S, pass_S], axis=1)
        found_F = np.linalg.lstsq(one_SF, second_S, rcond=None)[0]
        left_S = second_S - one_SF @ found_F
        noise = float(left_S @ left_S) / max(len(left_S) - 3, 1)
        error_F = np.sqrt(noise * np.diag(np.linalg.pinv(one_SF.T @ one_SF)))
        if (found_F >= 0).all() and (found_F > _CLEAR * error_F)[1:].all():
            fixed, token, micro = found_F.tolist()
            return fixed, token, micro
    away_S = token_S - token_S.mean()
    if (spread := float(away_S @ away_S)) > 0:
        slope = float(away_S @ second_S) / spread
        left_S = second_S - second_S.mean() - slope * away_S
        error = np.sqrt(float(left_S @ left_S) / max(len(left_S) - 2, 1) / spread)
        fixed = float(second_S.mean() - slope * token_S.mean())
        if slope > _CLEAR * error and fixed >= 0:
            return fixed, slope, 0.0
    total = float(token_S.sum())
    return (0.0, float(second_S.sum()) / total, 0.0) if total else (float(second_S.mean()), 0.0, 0.0)


def _lengths(rows: Sequence[Mapping[str, Any]]) -> Lengths:
    quantiles = np.mean([row["pace"]["lengths"] for row in rows], axis=0)
    return Lengths(
        quantiles=tuple(quantiles.tolist()),
        within=float(np.mean([row["pace"]["within"] for row in rows])),
        prompt=round(float(np.mean([row["pace"]["prompt"] for row in rows]))),
    )


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], field: str, key: str) -> float:
    return float(after[field][key]) - float(before[field][key])


def _cores(record: RunRecord) -> int:
    """Those that all processes of a run shared; 0 where roles had devices of their own, or none are known."""
    devices = record.config.get("devices") or {}
    shared = record.config.get("placement") == "local" and devices.get("generate and train") == "cpu"
    return int(devices.get("cores", 0)) if shared else 0


def _passes(record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Micro-batches of each step after the first, where one trainer has all of it; else none."""
    size = ((record.config.get("recipe") or {}).get("batch") or {}).get("micro")
    if not size or record.trainers > 1:
        return np.zeros(len(rows) - 1)
    return np.array([-(-row["completions_used"] // size) for row in rows[1:]], dtype=float)
