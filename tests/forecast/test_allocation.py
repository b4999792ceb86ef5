"""The best split of a budget, on simulated grids whose best is known."""

import functools
import json

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, SEED_PRIOR, Curve, Points, fit
from scalerl.curve.posterior import Draws
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.splits.allocation import GridRun, allocate
from scalerl.forecast.splits.hull import places_within

SD = np.array([0.004, 0.05, 0.03])
"""Errors of a fit, in A, log B and log C_mid."""
R_0, B = 0.3, 1.9
MANY = (2, 4, 8, 16, 32, 64, 128, 256)
FEW = (4, 8, 16, 32, 64)
BUDGETS = (2500.0, 3500.0, 5000.0, 7000.0, 10000.0)


def theta(prompts, samples, later, rise, fall):
    """More samples have a higher ceiling, up to a point, and get there later: so their best grows with C."""
    v, u = np.log(samples / 16), np.log(prompts / 32)
    return 0.6 + rise * v - fall * v**2 - 0.02 * u**2, np.log(B) + 0 * v, np.log(2500) + later * v


def true_best(samples, truth):
    fine = np.geomspace(min(samples), max(samples), 4000)
    A, log_b, log_mid = theta(32, fine, **truth)
    return [fine[np.argmax(R_0 + (A - R_0) / (1 + (np.exp(log_mid) / c) ** np.exp(log_b)))] for c in BUDGETS]


def grid(rng, prompts, samples, truth, seeds=1, n=400):
    tau_3 = SEED_PRIOR.median_3 * np.exp(SEED_PRIOR.log_sd * rng.normal(size=3))
    runs = []
    for p in prompts:
        for s in np.repeat(samples, seeds):
            run_3 = np.array(theta(p, s, **truth)) + tau_3 * rng.normal(size=3) + SD * rng.normal(size=3)
            A_n, log_b_n, log_mid_n = run_3[:, None] + SD[:, None] * rng.normal(size=(3, n))
            draws = Draws(FAMILIES, np.zeros(n, dtype=int), A_n, log_b_n, log_mid_n, np.full(n, R_0))
            runs.append(GridRun(int(p), int(s), draws, 10_000.0))
    return runs


MOVING = {"later": 0.4, "rise": 0.08, "fall": 0.03}
FLAT = {"later": 0.0, "rise": 0.0, "fall": 0.0}
RISING = {"later": 0.0, "rise": 0.04, "fall": 0.0}


@pytest.mark.parametrize(("prompts", "seeds"), [((32,), 1), ((32,), 3), ((16, 32, 64), 1)])
def test_the_interval_of_a_best_that_moves_holds_it(prompts, seeds):
    rng, best = np.random.default_rng(5), true_best(MANY, MOVING)
    np.testing.assert_allclose(best, [12.4, 16.2, 21.7, 28.3, 36.3], rtol=0.01)
    slope = np.polyfit(np.log(BUDGETS), np.log(best), 1)[0]
    covered, slopes, widths = [], [], []
    for _ in range(8):
        found = allocate(grid(rng, prompts, MANY, MOVING, seeds), 1.0, budgets=BUDGETS)
        for at, truth in zip(found.budgets, best, strict=True):
            assert at.samples is not None
            assert at.samples.tells
            covered.append(at.samples.interval[0] <= truth <= at.samples.interval[1])
            widths.append(np.log(at.samples.interval[1] / at.samples.interval[0]))
        growth = next(growth for growth in found.growth if growth.of == "samples")
        assert growth.interval is not None
        slopes.append(growth.interval[0] <= slope <= growth.interval[1])
    # 40 intervals, five of every grid much the same; a factor of e from end to end, of a grid of e^4.9.
    assert np.mean(covered) >= 0.85
    assert np.mean(slopes) >= 0.7
    assert np.mean(widths) < 1.0


def test_a_flat_surface_cannot_tell():
    rng = np.random.default_rng(1)
    best = [
        at.samples
        for _ in range(6)
        for at in allocate(grid(rng, (32,), FEW, FLAT), 1.0, budgets=BUDGETS).budgets
    ]
    assert (
        np.mean([str(one).startswith("cannot tell: anything on the grid [4, 64]") for one in best if one])
        > 0.8
    )


def test_a_best_beyond_the_edge_says_at_least():
    rng = np.random.default_rng(2)
    for _ in range(4):
        found = allocate(grid(rng, (16, 32, 64), FEW, RISING), 1.0, budgets=BUDGETS)
        for at in found.budgets[1:]:
            assert at.samples is not None
            assert (at.samples.at_low, at.samples.at_high) == (False, True)
            assert str(at.samples).startswith("at least ")
            assert at.samples.interval[0] > 16
            assert any(samples == 64 for _, samples in at.cells)
        growth = next(growth for growth in found.growth if growth.of == "samples")
        assert growth.slope is None
        assert "from both ends of the grid at 0 of 5 budgets" in growth.why


def test_without_noise_the_split_is_exact():
    """A quadratic in log n with its top at 16, the same at all computes far out; 4 prompts, cost 2."""
    runs = []
    for samples in (4, 8, 16, 32, 64):
        A = 0.6 - 0.01 * np.log(samples / 16) ** 2
        full = [np.full(200, value) for value in (A, np.log(3.0), np.log(1.0), R_0)]
        runs.append(GridRun(4, samples, Draws(FAMILIES, np.zeros(200, dtype=int), *full), 1e5))
    silent = type(SEED_PRIOR)(A=1e-6, log_b=1e-6, log_mid=1e-6)
    (at,) = allocate(runs, 2.0, budgets=[12_800.0], seed_prior=silent).budgets
    assert at.prompts is None
    assert at.samples is not None
    assert at.samples.median == pytest.approx(16, rel=0.03)
    assert at.steps[0] == pytest.approx(12_800 / (4 * 16 * 2), rel=0.03)
    assert at.pass_rate[0] == pytest.approx(0.6, abs=1e-3)
    assert at.cells == ((4, 16),)


def test_the_hull_of_a_triangle_and_of_a_line():
    triangle = np.array([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [-0.5, -0.5]])
    places = places_within(triangle)
    assert (places.sum(axis=1) <= 1e-9).all()
    assert all((np.abs(places - corner).sum(axis=1) < 1e-12).any() for corner in triangle)
    # P * n the same in all runs: the batch is bounded, and only its split is sought.
    line = places_within(np.array([[-1.0, 1.0], [0.0, 0.0], [1.0, -1.0]]))
    np.testing.assert_allclose(line.sum(axis=1), 0, atol=1e-12)
    assert line.min() == pytest.approx(-1)


def test_from_fits_it_prints_and_is_json():
    rng, compute_N = np.random.default_rng(0), np.linspace(0, 10_000, 21)
    runs = []
    for samples in (8, 16, 32):
        A, log_b, log_mid = theta(32, samples, **MOVING)
        y_N = Curve(LOG_LOGISTIC, float(A), float(np.exp(log_b)), float(np.exp(log_mid)), R_0)(compute_N)
        found = fit(Points.from_arrays(compute_N, y_N + rng.normal(0, 0.005, 21), axis="gpu_hours"))
        runs.append(GridRun.of(found, 32, samples))
    answer = allocate(runs, 0.01)
    assert [at.budget for at in answer.budgets][::5] == pytest.approx([1250, 10_000])
    assert json.loads(json.dumps(answer.to_json()))["budgets"][0]["prompts"] is None
    assert "completions per prompt: " in str(answer)


def test_what_cannot_be_asked_is_refused():
    ask = functools.partial(grid, np.random.default_rng(0))
    with pytest.raises(CannotAnswerError, match="two have no middle"):
        allocate(ask((32,), (8, 16), FLAT), 1.0)
    with pytest.raises(InputError, match="found none"):
        allocate([], 1.0)
    with pytest.raises(InputError, match="above 0"):
        allocate(ask((32,), FEW, FLAT), 0.0)
    with pytest.raises(InputError, match="rising"):
        allocate(ask((32,), FEW, FLAT), 1.0, budgets=[2.0, 1.0])
