"""What must not change an answer: the unit of compute, the order of rows, where the pass rate's zero lies."""

from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Fit, Points, fit
from scalerl.curve.least_squares import least_squares
from scalerl.curve.noise import ar1
from scalerl.curve.points import with_doubts
from scalerl.curve.sample import make_sample

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.28)
N = 24


def run(seed: int, n: int = N, sd: float = 0.004, phi: float = 0.0, reach: float = 8000) -> Points:
    """n evaluations up to `reach`, one of them before training; noise of sd, AR(1) with phi."""
    rng = np.random.default_rng(seed)
    compute_N = np.linspace(0, reach, n)
    noise_N = ar1(rng.normal(0, sd, n), phi)
    return Points.from_arrays(compute_N, TRUTH(compute_N) + noise_N, step=10.0 * np.arange(n))


@pytest.mark.parametrize("unit", [1e-6, 1e9, 3.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_unit_of_compute(unit, seed):
    points = run(seed)
    own, other = fit(points), fit(replace(points, compute_N=points.compute_N * unit))
    np.testing.assert_allclose(
        numbers(other.paper_curve), numbers(own.paper_curve) * [1, 1, 1, unit], rtol=1e-6
    )
    for name in ("A", "A_given_family", "B"):
        assert getattr(other.intervals, name) == pytest.approx(getattr(own.intervals, name), rel=1e-5)
        assert getattr(other.median, name) == pytest.approx(getattr(own.median, name), rel=1e-5)
    assert other.intervals.C_mid == pytest.approx(np.array(own.intervals.C_mid) * unit, rel=1e-5)
    mine, its = own.forecast(16_000.0), other.forecast(16_000.0 * unit)
    assert (its.median, *its.interval, *its.prediction) == pytest.approx(
        (mine.median, *mine.interval, *mine.prediction), rel=1e-5
    )
    assert other.families == pytest.approx(own.families, rel=1e-5)


def test_the_order_of_rows():
    points = run(2)
    order = np.random.default_rng(0).permutation(N)
    shuffled = fit(points.select(order)).to_json([16_000.0], 0.6, 16_000.0)
    assert shuffled == fit(points).to_json([16_000.0], 0.6, 16_000.0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_pass_rate_that_is_shrunk_and_shifted(family):
    """y' = a + b y: R_0' = a + b R_0, A' = a + b A; B and C_mid stay, where no bound is reached."""
    points, a, b = run(3, reach=40_000), 0.2, 0.5
    moved = replace(points, pass_rate_N=a + b * points.pass_rate_N)
    own = least_squares(make_sample(points, None), family)
    other = least_squares(make_sample(moved, None), family)
    assert not own.at_bounds
    np.testing.assert_allclose(numbers(other.curve)[:2], a + b * numbers(own.curve)[:2], rtol=1e-6)
    np.testing.assert_allclose(numbers(other.curve)[2:], numbers(own.curve)[2:], rtol=1e-5)
    np.testing.assert_allclose(other.rss, b**2 * own.rss, rtol=1e-6)


def test_every_row_twice_is_the_same_curve():
    """And says more only where the rows are not known to be of one step: then they are other evaluations."""
    steps = run(5)
    again = fit(steps.select(np.repeat(np.arange(N), 2)))
    assert width(again) == pytest.approx(width(fit(steps)), rel=1e-9)
    points = replace(steps, step_N=None)
    twice = points.select(np.repeat(np.arange(N), 2))
    own, other = (fit(p) for p in (points, twice))
    np.testing.assert_allclose(numbers(other.paper_curve), numbers(own.paper_curve), rtol=1e-6)
    assert other.rmse == pytest.approx(own.rmse, rel=1e-5)
    assert 0.35 < width(other) / width(own) < 1.0  # 1 / sqrt 2 with independent noise of known size
    assert f"{N} evaluations have the compute and the pass rate of another" in with_doubts(twice).warnings[-1]
    assert not with_doubts(points).warnings


@pytest.mark.parametrize(("phi", "low", "high"), [(0.8, 0.95, 1.3), (0.0, 1.35, 2.0)])
def test_thinning_costs_little_where_the_noise_is_correlated(phi, low, high):
    """Of noise that evaluations share, every second one tells most; of independent noise it tells half.

    The ratio of the widths of A given the family, as a geometric mean over 12 runs. With the correlation
    known a mean would lose a factor of 1.01 at phi = .8, and sqrt 2 at 0; it has to be estimated, so that
    both cost more.
    """
    runs = [run(seed, n=48, sd=0.005, phi=phi) for seed in range(10, 22)]
    ratio = [width(fit(points.select(np.arange(0, 48, 2)))) / width(fit(points)) for points in runs]
    assert low < np.exp(np.mean(np.log(ratio))) < high


def width(found: Fit) -> float:
    low, high = found.intervals.A_given_family
    return high - low


def numbers(curve: Curve) -> np.ndarray:
    """(R_0, A, B, C_mid)."""
    return np.array([curve.R_0, curve.A, curve.B, curve.C_mid])
