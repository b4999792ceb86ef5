"""A run folder as a trainer writes it: 31 evaluations over 240 steps along a known curve, seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl.record.evaluation import DeviceSeconds, EvalPoint, Flops, Tokens, mean_p_1mp
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter

N_STEPS, EVERY, N_SAMPLES = 240, 8, 16
N_EVALS = N_STEPS // EVERY + 1
FLOPS_PER_STEP = 6.1e10
A, B, C_MID, R_0 = 0.82, 1.6, 55 * FLOPS_PER_STEP, 0.23

CONFIG = {
    "name": "scalerl-chain",
    "seed": 3,
    "recipe": {
        "steps": N_STEPS,
        "loss": {"kind": "cispo", "max_ratio": 5.0},
        "advantage": {"normalise": "batch"},
        "schedule": {"kind": "pipeline", "k": 8, "rows": 256},
        "optimiser": {"lr": 2e-4, "warmup_steps": 10, "betas": [0.9, 0.95], "weight_decay": None},
        "data": {"task": {"name": "chain", "k_max": 10}, "no_positive_resampling": True},
    },
    "model": {"path": "models/chain-base", "parameters": 107_264},
    "base": {"pass_rate": 0.231, "seconds": 41.0, "flops": 2.2e12},
    "ceiling": {"value": 0.82, "why": "trained on perfect demonstrations under the same budget"},
    "versions": {"python": "3.11.9", "torch": "2.13.0", "scalerl": "0.1.0"},
    "devices": ["cpu"],
    "budget": {"steps": N_STEPS},
    "strata": "chain length",
}


def curve(compute: np.ndarray) -> np.ndarray:
    """The truth behind the synthetic run: a log-logistic curve in flops."""
    ratio = np.divide(C_MID, compute, out=np.full(np.shape(compute), np.inf), where=np.asarray(compute) > 0)
    return R_0 + (A - R_0) / (1 + ratio**B)


def frozen_row(**changes: Any) -> dict[str, Any]:
    """A line of forecasts.jsonl made at half of the compute, set by hand; `changes` replace its keys."""
    target = N_STEPS * FLOPS_PER_STEP
    grid = np.linspace(target / 100, target, 100)
    spread = 0.004 + 0.03 * np.clip(grid / target - 0.5, 0, None)
    row = {
        "made_at_step": N_STEPS // 2,
        "time": 1.7e9,
        "axis": "flops",
        "compute": target / 2,
        "target_compute": target,
        "median": 0.753,
        "prediction": [0.722, 0.781],
        "curve": {
            "compute": grid,
            "median": curve(grid),
            "lo": curve(grid) - spread,
            "hi": curve(grid) + spread,
        },
        "fit_json": {
            "points": 16,
            "axis": "flops",
            "r0": {"value": 0.2305, "source": "measured"},
            "fit": {
                "family": "log_logistic",
                "A": 0.761,
                "B": 1.92,
                "C_mid": 2.94e12,
                "R_0": 0.2305,
                "rmse": 0.0123,
            },
            "median": {"A": 0.811, "A_given_family": 0.801, "B": 1.63, "C_mid": 3.31e12},
            "intervals": {"level": 0.95, "A": [0.768, 0.879], "B": [1.35, 1.94], "C_mid": [3.02e12, 3.66e12]},
            "families": {"log_logistic": 0.55, "weibull": 0.14, "frechet": 0.31},
            "noise": {"sd": 0.0071, "phi": 0.2, "floor": 0.0069},
            "identified": True,
            "why": "the run reached 2.2 C_mid",
            "c_max_over_c_mid": 2.2,
            "warnings": ["one evaluation lies 2.4 sd off the curve"],
        },
    }
    return {**row, **changes}


def step_row(step: int, rng: np.random.Generator) -> dict[str, Any]:
    """A line of steps.jsonl with figures that move as in a real run."""
    done = step / N_STEPS
    zero_variance = float(np.clip(0.25 + 0.3 * done + 0.05 * rng.normal(), 0, 1))
    return {
        "step": step,
        "time": 1.7e9 + 0.25 * step + 0.02 * rng.random(),
        "loss": float(0.02 * rng.normal()),
        "grad_norm": float(0.6 * np.exp(0.25 * rng.normal() - done)),
        "reward_mean": float(2 * curve(np.array(step * FLOPS_PER_STEP)) - 1 + 0.05 * rng.normal()),
        "groups": 16,
        "groups_used": round(16 * (1 - zero_variance)),
        "zero_variance": zero_variance,
        "truncated": float(np.clip(0.03 - 0.02 * done + 0.01 * rng.normal(), 0, 1)),
        "interrupted": float(np.clip(0.02 + 0.12 * done + 0.01 * rng.normal(), 0, 1)),
        "mean_length": 6 + 6 * done + float(0.3 * rng.normal()),
        "entropy": float(0.9 - 0.5 * done + 0.03 * rng.normal()),
        "ratio_clipped": float(np.clip(0.004 + 0.002 * rng.normal(), 0, 1)),
        "ratio_mean": 1 + float(0.01 * rng.normal()),
        "ratio_max": 1.5 + float(0.2 * rng.random()),
        "kv_staleness_max": int(min(step, rng.integers(7, 11))),
        "staleness_mean": float(min(step, 4) * 0.8 + 0.3 * rng.random()),
        "staleness_max": int(min(step, rng.integers(6, 9))),
        "staleness_share_over_4": float(np.clip(0.2 + 0.05 * rng.normal(), 0, 1)) if step > 5 else 0.0,
        "multi_version": float(np.clip(0.55 + 0.05 * rng.normal(), 0, 1)) if step > 2 else 0.0,
        "pool": 4000 - 9 * step,
        "tokens": {"generated": 2600 * step, "trained": 2300 * step},
        "skipped": False,
    }


def write_run(
    path: Path,
    config: dict[str, Any],
    n_evals: int = N_EVALS,
    steps: bool = True,
    truth: Callable[[np.ndarray], np.ndarray] = curve,
) -> RunWriter:
    """Write the synthetic run under `path`, along `truth` in flops; the caller adds the forecasts."""
    rng = np.random.default_rng(7)
    writer = RunWriter(path, config)
    lengths = np.arange(1, 11).repeat(30)
    ids = [f"chain/{length}/{number}" for number, length in enumerate(lengths)]
    difficulty = rng.normal(size=lengths.size) * 0.6 + 0.45 * (lengths - 5.5) + 3.0 * (lengths > 8)
    for step in range(0, n_evals * EVERY, EVERY):
        rate = float(truth(np.array(step * FLOPS_PER_STEP)))
        p = _with_mean(difficulty, rate)
        correct = rng.binomial(N_SAMPLES, p)
        point = EvalPoint(
            step=step,
            pass_rate=float(correct.mean() / N_SAMPLES),
            time=1.7e9 + step / 4,
            device_seconds=DeviceSeconds(0.13 * step, 0.09 * step, 0.05 * step, 0.01 * step),
            flops=Flops(0.4 * FLOPS_PER_STEP * step, 0.6 * FLOPS_PER_STEP * step),
            tokens=Tokens(2600.0 * step, 2300.0 * step),
            samples=256.0 * step,
            prompts=16.0 * step,
            version=step,
            n_prompts=lengths.size,
            n_samples=N_SAMPLES,
            mean_p_1mp=mean_p_1mp(correct, N_SAMPLES),
        )
        writer.evaluation(point, "held-out", ids, correct)
    for step in range(1, N_STEPS + 1) if steps else ():
        writer.step(step_row(step, rng))
    return writer


def _with_mean(difficulty: np.ndarray, rate: float) -> np.ndarray:
    """Success probabilities that fall with `difficulty` and have the mean `rate`, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(difficulty - middle))) < rate:
            low = middle
        else:
            high = middle
    return 1 / (1 + np.exp(difficulty - low))


MakeRun = Callable[..., RunRecord]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run that lacks this or that, and read it back.

    `config` replaces keys of the configuration (None takes one away); `forecasts` holds the changes of
    each line of forecasts.jsonl.
    """

    def make(
        n_evals: int = N_EVALS,
        steps: bool = True,
        forecasts: Sequence[dict[str, Any]] = (),
        truth: Callable[[np.ndarray], np.ndarray] = curve,
        **config: Any,
    ) -> RunRecord:
        merged = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
        writer = write_run(tmp_path / "run", merged, n_evals, steps, truth)
        for changes in forecasts:
            writer.forecast(frozen_row(**changes))
        return RunRecord.read(writer.path)

    return make


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The whole run, with a forecast at a quarter and one at half of the compute; read only."""
    path = tmp_path_factory.mktemp("runs") / "scalerl-chain"
    writer = write_run(path, CONFIG)
    quarter = N_STEPS * FLOPS_PER_STEP / 4
    writer.forecast(
        frozen_row(made_at_step=60, compute=quarter, median=0.66, prediction=[0.55, 0.74], curve={})
    )
    writer.forecast(frozen_row())
    return RunRecord.read(path)
