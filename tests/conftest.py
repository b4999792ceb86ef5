"""What tests of several files share: a small base model, and the folders of simulated studies.

These are written as the runner does, with curves, noise, base models and seeds that are known.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hostile_study
import numpy as np
import pytest
from browser_tools import chromium
from extensions import write_extensions
from hypothesis import HealthCheck, settings

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.jsonl import dumps
from scalerl.record.evaluation import EvalPoint, Flops, Tokens
from scalerl.study.verdict.verdict import StudyVerdict

# As commands set them, which are called in this process: workers are not forked from one that has loaded
# libraries with others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # Ray reads it once: no call starts a cluster by itself

# Inputs are drawn the same each time; how long that takes is a matter of the machine.
settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    print_blob=False,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
settings.load_profile("tests")

STEPS, EVERY, BUDGET = 400, 16, 10_000.0
PROMPTS, SAMPLES = 128, 64
BLOCK_SD = (0.04, 0.2)
"""Of the base models, in A and log C_mid; R_0 moves by half of that in A."""
SEED_SD = (0.005, 0.02)
"""Of seeds within a base model."""
RECIPE = {"schedule": {"kind": "pipeline_rl", "k": 8}, "loss": {"kind": "cispo", "max_ratio": 5.0}}


@dataclass(frozen=True)
class Truth:
    """An arm: its curve, to which step each of its seeds gets, what it changes, and lines of steps.jsonl."""

    A: float = 0.61
    C_mid: float = 2500.0
    last: Mapping[int, int] = field(default_factory=dict)
    """By seed; all steps where it is not said. -1 is before the first evaluation."""
    changes: dict[str, Any] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()


def write_study(
    path: Path, arms: Mapping[str, Truth], seeds: int = 4, draw: int = 0, budget: float = BUDGET, **plan: Any
) -> Path:
    """Write a study of these arms; the same `draw` is the same study. `budget` is that of every run."""
    rng = np.random.default_rng(draw)
    block_S3 = rng.normal(0, 1, (seeds, 2)) * BLOCK_SD
    runs, attempts = [], []
    for name, truth in arms.items():
        for seed in range(seeds):
            moved = block_S3[seed] + rng.normal(0, 1, 2) * SEED_SD
            A, C_mid = truth.A + moved[0], truth.C_mid * math.exp(moved[1])
            curve = Curve(LOG_LOGISTIC, A, 1.9, C_mid, 0.35 + block_S3[seed, 0] / 2)
            run = {"arm": name, "seed": seed, "model": f"base-{seed}", "folder": f"runs/{name}/seed{seed}"}
            runs.append(run)
            last = truth.last.get(seed, STEPS)
            _write_run(path / run["folder"], curve, last, budget, truth.steps, rng)
            if last < STEPS:
                line = {"run": f"{name} seed {seed}", "outcome": "failed", "cause": "out of memory"}
                attempts += [line | {"seconds": 5.0, "until": budget}] * 2
    study = {
        "schema": 1, "name": "simulated", "kind": "arms", "base": next(iter(arms)), "axis": "flops",
        "budgets": [budget / 4, budget / 2, budget], "target": None, "price": None, "retries": 1,
        "warnings": [], "runs": runs,
        "arms": [{"name": n, "changes": t.changes, "recipe": RECIPE | t.changes} for n, t in arms.items()],
    }  # fmt: skip
    (path / "study.json").write_text(dumps(study | plan))
    write_lines(path / "attempts.jsonl", attempts)
    return path


def _write_run(
    folder: Path,
    curve: Curve,
    last: int,
    budget: float,
    steps: tuple[dict[str, Any], ...],
    rng: np.random.Generator,
) -> None:
    folder.mkdir(parents=True)
    noise = rng.normal(0, 1, STEPS // EVERY + 1)
    noise[0] = 0.0  # before any training all arms are one model
    points = []
    for step, z in zip(range(0, last + 1, EVERY), noise, strict=False):
        compute = budget * step / STEPS
        rate = float(curve(np.array(compute)))
        point = EvalPoint(step, rate, flops=Flops(0.3 * compute, 0.7 * compute))
        point = replace(point, tokens=Tokens(2 * compute, compute), samples=32.0 * step)
        point = replace(point, n_prompts=PROMPTS, n_samples=SAMPLES)
        # Three fifths of p (1 - p) is within prompts, the rest between them.
        point = replace(point, mean_p_1mp=0.6 * rate * (1 - rate), truncated=0.02)
        points.append(replace(point, pass_rate=float(np.clip(rate + z * point.noise_sd, 0, 1))))
    if points:
        write_lines(folder / "evals.jsonl", [asdict(point) for point in points])
        write_lines(folder / "steps.jsonl", list(steps))
    if last == STEPS:
        (folder / "checkpoints" / "final").mkdir(parents=True)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON Lines."""
    path.write_text("".join(dumps(row) + "\n" for row in rows))


class Studies:
    """What tests make studies with."""

    Truth = Truth
    write = staticmethod(write_study)
    lines = staticmethod(write_lines)

    @staticmethod
    def evaluations(run: Path) -> list[dict[str, Any]]:
        """The lines of its evals.jsonl."""
        return [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def studies() -> type[Studies]:
    """Writes the folders of simulated studies."""
    return Studies


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files of the pages of docs/extend in it."""
    monkeypatch.chdir(tmp_path)
    write_extensions(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of chains of two, right one time in four: it leaves RL something to do."""
    from scalerl.rl.model.demo_base import BaseModel, build_base
    from scalerl.rl.tasks.chain import Chain, Demonstrations

    spec = BaseModel(
        Demonstrations(Chain(k_max=2, heldout_per_length=40), 4),
        intermediate_size=128,
        max_careful_steps=400,
        imperfect_steps=60,
        careful_loss=0.1,
    )
    return build_base(spec, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `small_runs`: it knows the form of an answer, and guesses."""
    from small_runs import small_model

    return small_model(tmp_path_factory.mktemp("guesser"))


@pytest.fixture(scope="session")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> StudyVerdict:
    """Of a study whose names are hostile to every format, one of whose arms failed in all of its runs."""
    return hostile_study.build(
        tmp_path_factory.mktemp("study") / "name <i>", hostile_study.ARMS | {hostile_study.FAILED: None}
    )


@pytest.fixture(scope="session")
def misfit(tmp_path_factory: pytest.TempPathFactory) -> StudyVerdict:
    """Of a study in which a run of the base jumps, so that its verdicts are inconclusive."""
    found = hostile_study.build(tmp_path_factory.mktemp("misfit") / "study", jump=0.08, forecast=False)
    assert any(run.misfit for run in found.arms[0].fits)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests: two of them in one thread are one too many."""
    with chromium() as started:
        yield started


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says it where pages were not looked at."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if missed := sum("browser tests need" in why for why in skipped):
        terminalreporter.write_line(f"{missed} browser tests skipped: they need chromium and playwright")
