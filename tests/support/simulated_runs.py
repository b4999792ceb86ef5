"""Run folders along known curves, all compute axes logged, with a forecast frozen half way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.errors import CannotAnswerError
from scalerl.forecast.freeze import freeze
from scalerl.record.evaluation import DeviceSeconds, EvalPoint, Flops, Tokens
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter

BUDGET, STEPS = 12_000.0, 240
HOSTILE = "<script>document.title='owned'</script> <img src=x onerror=document.title='owned'> %{x} & co"


def write_run(
    folder: Path,
    name: str,
    A: float = 0.6,
    seed: int = 0,
    n: int = 25,
    recipe: dict[str, Any] | None = None,
    forecast: bool = True,
) -> Path:
    """A run of `n` evaluations to `BUDGET` GPU-hours; tokens run ahead of the hours towards the end."""
    rng = np.random.default_rng(seed)
    step_N = np.linspace(0, STEPS, n).round()
    hours_N = np.linspace(0, BUDGET, n)
    rate_N = Curve(LOG_LOGISTIC, A, 1.9, 2500.0, 0.3)(hours_N) + rng.normal(0, 0.006, n)
    writer = RunWriter(
        folder, {"name": name, "seed": seed, "recipe": recipe, "budget": {"kind": "gpu_hours"}}
    )
    for number, (step, hours, rate) in enumerate(zip(step_N, hours_N, np.clip(rate_N, 0, 1), strict=True)):
        point = EvalPoint(
            step=int(step),
            pass_rate=float(rate),
            device_seconds=DeviceSeconds(2400.0 * hours, 1200.0 * hours, 0.0, 0.0),
            flops=Flops(1e15 * hours, 3e15 * hours),
            tokens=Tokens(tokens_at(hours), tokens_at(hours) / 2),
            samples=32.0 * step,
            n_prompts=200,
            n_samples=16,
            mean_p_1mp=0.12,
            truncated=0.021,
            entropy=0.31,
        )
        writer.evaluation(point, "held-out", ["p"], np.array([1]))
        if forecast and number == n // 2:
            _freeze(writer)
    writer.close()
    return folder


def tokens_at(hours: Any) -> Any:
    """Tokens that a simulated run has spent at so many GPU-hours, a number or an array."""
    return 1e5 * hours * (1 + hours / BUDGET)


def write_many(folder: Path, count: int) -> list[Path]:
    """So many short runs of different ceilings, in two recipes."""
    return [
        write_run(
            folder / f"r{i}", f"run {i}", 0.5 + 0.001 * i, i, 9, {"lr": i // (count / 2)}, forecast=False
        )
        for i in range(count)
    ]


def write_table(path: Path, n: int, A: float = 0.6) -> Path:
    """A CSV of `n` evaluations with one outlier, the last but hundredth, and with a loss from 1 to 0."""
    rng = np.random.default_rng(1)
    hours_N = np.linspace(0, BUDGET, n)
    rate_N = Curve(LOG_LOGISTIC, A, 1.9, 2500.0, 0.3)(hours_N) + rng.normal(0, 0.01, n)
    rate_N[-100:-99] = 0.2
    rows = [
        f"{hours:.6g},{rate:.5f},{1 - hours / BUDGET:.4f}"
        for hours, rate in zip(hours_N, rate_N, strict=True)
    ]
    path.write_text("\n".join(["gpu_hours,pass_rate,loss", *rows]))
    return path


def _freeze(writer: RunWriter) -> None:
    with suppress(CannotAnswerError):  # a run of few evaluations has none
        writer.forecast(freeze(RunRecord.read(writer.path), "gpu_hours", BUDGET))
