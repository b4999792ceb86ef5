import math

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points
from scalerl.errors import CannotAnswerError
from scalerl.forecast.baselines import (
    fit_last_value,
    fit_log_linear,
    fit_power_law,
)


# The published 100k run (A .645, B 1.70, C_mid 10909) without noise, for R_0 from .20 to .40. The power law
# fitted to ever later parts of it: arXiv 2510.13786 reports 1.0, .74 and about .65.
@pytest.mark.parametrize(
    ("start", "end", "at_20", "at_40"),
    [(1500, 50000, 1.0, 1.0), (5000, 50000, 0.806, 0.733), (30000, 60000, 0.650, 0.648)],
)
def test_the_power_law_mistakes_the_ceiling_of_a_sigmoid(start, end, at_20, at_40):
    compute_N = np.linspace(start, end, 200)
    for r0, ceiling in ((0.20, at_20), (0.40, at_40)):
        truth = Curve(LOG_LOGISTIC, 0.645, 1.70, 10909.0, r0)
        found = fit_power_law(Points.from_arrays(compute_N, truth(compute_N)))
        assert pytest.approx(ceiling, abs=7e-4) == found.A
        assert found.R_0 == 0


def test_the_power_law_gives_its_own_parameters_back():
    # .7 - 8 / C^.5; step 0, where it would be minus infinity, is left out
    compute_N = np.linspace(0, 8000, 17)
    y_N = np.append(0.0, 0.7 - 8 / compute_N[1:] ** 0.5)
    found = fit_power_law(Points.from_arrays(compute_N, y_N))
    D = found.A * found.C_mid**found.B / 2
    np.testing.assert_allclose((found.A, found.B, D), (0.7, 0.5, 8.0), rtol=1e-6)


def test_last_value_is_the_mean_of_the_last_evaluations():
    points = Points.from_arrays([300, 100, 300, 200], [0.5, 0.9, 0.6, 0.1])
    line = fit_last_value(points)
    np.testing.assert_array_equal(line(np.array([1.0, 1e9])), [0.55, 0.55])


def test_log_linear_by_hand():
    # Through (1, .1), (e, .2), (e^2, .6): slope .25, at the mean of the logarithms (1) it is .3.
    line = fit_log_linear(Points.from_arrays([0.0, 1.0, math.e, math.e**2], [0.0, 0.1, 0.2, 0.6]))
    np.testing.assert_allclose(line(np.array([1.0, math.e, math.e**3])), [0.05, 0.3, 0.8], rtol=1e-14)


@pytest.mark.parametrize(("fit", "needed"), [(fit_last_value, 1), (fit_log_linear, 2), (fit_power_law, 3)])
def test_too_few_points_are_said(fit, needed):
    compute_N = np.arange(1.0, needed)
    with pytest.raises(CannotAnswerError, match=f"{needed} are needed"):
        fit(Points.from_arrays(compute_N, np.full(needed - 1, 0.3)))
