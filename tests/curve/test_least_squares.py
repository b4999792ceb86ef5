import math

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Points
from scalerl.curve.least_squares import least_squares, least_squares_many
from scalerl.curve.sample import make_sample

# C_mid, B, A of the published fits (arXiv 2510.13786), R_0 about .40.
PUBLISHED = [
    (2542, 1.92, 0.610),
    (11272, 1.89, 0.645),
    (2542, 2.44, 0.585),
    (4242, 1.65, 0.710),
    (10909, 1.70, 0.645),
    (1675, 1.09, 0.615),
    (3000, 4.97, 0.490),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("step_0", [True, False])
@pytest.mark.parametrize(("C_mid", "B", "A"), PUBLISHED)
def test_exact_points_give_the_parameters_back(family, step_0, C_mid, B, A):
    truth = Curve(family, A, B, float(C_mid), 0.40)
    last = max(8000, 2 * C_mid)  # the power law leaves R_0 late, and needs points above it
    compute_N = np.linspace(0, last, 16)[0 if step_0 else 1 :]
    best = least_squares(make_sample(Points.from_arrays(compute_N, truth(compute_N)), None), family)
    found = (best.curve.A, best.curve.B, best.curve.C_mid, best.curve.R_0)
    np.testing.assert_allclose(found, (A, B, C_mid, 0.40), rtol=1e-6)
    assert best.at_bounds == ()


def test_given_r0_is_held():
    truth = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
    compute_N = np.linspace(500, 8000, 16)
    best = least_squares(make_sample(Points.from_arrays(compute_N, truth(compute_N)), 0.40), LOG_LOGISTIC)
    assert best.curve.R_0 == 0.40
    assert pytest.approx(0.61, rel=1e-7) == best.curve.A


def test_no_other_start_finds_less():
    # A brute grid over all four parameters around and far from the optimum never goes below it.
    rng = np.random.default_rng(3)
    truth = Curve(LOG_LOGISTIC, 0.8, 1.5, 3000.0, 0.3)
    compute_N = np.linspace(0, 9000, 14)
    y_N = truth(compute_N) + rng.normal(0, 0.01, 14)
    best = least_squares(make_sample(Points.from_arrays(compute_N, y_N), None), LOG_LOGISTIC)
    for _ in range(3000):
        A, R_0 = rng.uniform(0.5, 1.0), rng.uniform(0.2, 0.4)
        B, C_mid = np.exp(rng.uniform(-1, 2)), np.exp(rng.uniform(6, 10))
        rss = np.sum((y_N - Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(compute_N)) ** 2)
        assert best.rss <= rss
    # and at the optimum the gradient vanishes
    for name, value in (("A", 1e-5), ("B", 1e-4), ("C_mid", 0.1), ("R_0", 1e-5)):
        for sign in (-1, 1):
            p = {"A": best.curve.A, "B": best.curve.B, "C_mid": best.curve.C_mid, "R_0": best.curve.R_0}
            p[name] += sign * value
            assert np.sum((y_N - Curve(LOG_LOGISTIC, **p)(compute_N)) ** 2) > best.rss


def test_a_ceiling_on_its_bound_is_flagged():
    # A line that has not bent: any ceiling will do, and A runs into 1.
    compute_N = np.linspace(0, 1000, 12)
    best = least_squares(
        make_sample(Points.from_arrays(compute_N, 0.2 + 0.0004 * compute_N), None), LOG_LOGISTIC
    )
    assert best.curve.A == 1.0
    assert "A" in best.at_bounds


def test_replicates_weigh_as_many_points():
    rng = np.random.default_rng(1)
    truth = Curve(LOG_LOGISTIC, 0.7, 1.6, 300.0, 0.2)
    compute_N = np.repeat(np.linspace(0, 1000, 9), 3)
    y_N = truth(compute_N) + rng.normal(0, 0.01, 27)
    best = least_squares(make_sample(Points.from_arrays(compute_N, y_N), None), LOG_LOGISTIC)
    residual_N = y_N - best.curve(compute_N)
    assert best.rss == pytest.approx(float(residual_N @ residual_N), rel=1e-9)


# Valleys that are bent, end on the bound A = 1 or B = 20, or are narrower than the grid; the least sum of
# squares by scipy.optimize.least_squares (trf, tolerances 1e-15) from 80 starts each.
HARD = {
    "A on its bound": (
        [15.5784, 30.0771, 58.0698, 112.115, 216.461, 417.92, 806.877],
        [0.218729, 0.218458, 0.217466, 0.219002, 0.218704, 0.224504, 0.369976],
        1.345225209538e-06,
    ),
    "A on its bound, shallow": (
        [7.14732, 17.9533, 45.0965, 113.277, 284.54, 714.732],
        [0.168843, 0.17015, 0.170479, 0.172331, 0.177416, 0.229983],
        3.479473476421e-06,
    ),
    "B on its bound": (
        [39.403, 98.9758, 248.616, 624.495, 1568.66],
        [0.04594, 0.06176, 0.048563, 0.137438, 0.280532],
        1.437711222720e-04,
    ),
    "B on its bound, bent": (
        [55.1271, 138.473, 347.828, 873.705, 2194.65, 5512.71],
        [0.569567, 0.551402, 0.546441, 0.693992, 0.983098, 0.98677],
        3.032053376561e-04,
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_valleys_are_followed_to_their_end(name):
    compute_N, y_N, rss = HARD[name]
    best = least_squares(make_sample(Points.from_arrays(compute_N, y_N), None), LOG_LOGISTIC)
    assert best.rss == pytest.approx(rss, rel=1e-9)
    assert best.at_bounds


def test_a_valley_narrower_than_the_grid_is_found():
    # Nothing but noise and a rise of half its size, as steep as it may be: no grid of C_mid has a node there.
    compute_N = 25.846 * np.arange(14)
    y_N = [0.599743, 0.598635, 0.597634, 0.597831, 0.599229, 0.597636, 0.60037]
    y_N = np.array([*y_N, 0.602164, 0.60169, 0.600232, 0.603805, 0.602126, 0.601809, 0.604804])
    best = least_squares(make_sample(Points.from_arrays(compute_N, y_N), None), LOG_LOGISTIC)
    least = math.inf
    for C_mid in np.geomspace(20, 400, 4000):
        share_N = Curve(LOG_LOGISTIC, 1.0, 20.0, C_mid, 0.0)(compute_N)
        least = min(least, np.linalg.lstsq(np.column_stack([1 - share_N, share_N]), y_N)[1][0])
    assert best.rss <= least
    assert pytest.approx(20) == best.curve.B


def test_the_company_of_other_runs_changes_no_answer():
    rng = np.random.default_rng(8)
    truth = Curve(LOG_LOGISTIC, 0.7, 1.6, 300.0, 0.2)
    samples = []
    for n in rng.permutation(np.arange(6, 130, 2)):
        compute_N = np.linspace(0, rng.uniform(200, 2000), n)
        samples.append(
            make_sample(Points.from_arrays(compute_N, truth(compute_N) + rng.normal(0, 0.03, n)), None)
        )
    together = least_squares_many(samples, LOG_LOGISTIC)
    alone = [least_squares(sample, LOG_LOGISTIC) for sample in samples]
    np.testing.assert_allclose([f.rss for f in together], [f.rss for f in alone], rtol=1e-10)
