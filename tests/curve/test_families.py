import math

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_half_of_the_gain_at_c_mid(family):
    curve = Curve(family, A=0.61, B=1.92, C_mid=2542.0, R_0=0.40)
    assert float(curve(2542.0)) == pytest.approx(0.505, abs=1e-12)
    assert float(curve(0.0)) == pytest.approx(0.40, abs=1e-12)
    assert float(curve(1e30)) == pytest.approx(0.61, abs=1e-12)


def test_values_worked_by_hand():
    # At 3 C_mid with B = 2: log-logistic 1/(1 + 1/9) = .9; Weibull 1 - 2^-9; Frechet 2^(-1/9).
    shares = {"log_logistic": 0.9, "weibull": 1 - 2**-9, "frechet": 2 ** (-1 / 9)}
    for family in FAMILIES:
        value = float(Curve(family, A=1.0, B=2.0, C_mid=100.0, R_0=0.0)(300.0))
        assert value == pytest.approx(shares[family.name], rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_slope_is_the_derivative_and_inverse_inverts(family):
    u = np.linspace(-3, 2.2, 14)
    h = 1e-5
    numeric = (family.share(u + h) - family.share(u - h)) / (2 * h)
    np.testing.assert_allclose(family.slope(u), numeric, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(family.inverse(family.share(u)), u, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_compute_to_reach_a_pass_rate(family):
    curve = Curve(family, A=0.645, B=1.70, C_mid=10909.0, R_0=0.40)
    for compute in (3000.0, 10909.0, 50000.0):
        assert curve.inverse(float(curve(compute))) == pytest.approx(compute, rel=1e-6)
    assert curve.inverse(0.40) == 0.0
    assert curve.inverse(0.645) == math.inf


def test_log_logistic_equals_the_papers_formula():
    C = np.array([150.0, 1000.0, 2542.0, 8000.0, 16000.0])
    R_0, A, B, C_mid = 0.40, 0.610, 1.92, 2542.0
    expected = R_0 + (A - R_0) / (1 + (C_mid / C) ** B)
    np.testing.assert_allclose(Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(C), expected, rtol=1e-13)
