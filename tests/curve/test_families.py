import math

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, POWER_LAW, Curve, Gompertz

ALL = (*FAMILIES, Gompertz())


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_half_of_the_gain_at_c_mid(family):
    curve = Curve(family, A=0.61, B=1.92, C_mid=2542.0, R_0=0.40)
    assert float(curve(2542.0)) == pytest.approx(0.505, abs=1e-12)
    start = 2 ** -math.exp(1.92) if family.name == "gompertz" else 0.0  # its asymptote lies below C = 0
    assert float(curve(0.0)) == pytest.approx(0.40 + 0.21 * start, abs=1e-12)
    assert float(curve(1e30)) == pytest.approx(0.61, abs=1e-12)


def mixture(early, later, slower):
    """A mixture of two logistic functions, moved to be half at u = 0, at u = 2 log 3."""
    low, high = -20.0, 20.0

    def at(x):
        return early / (1 + math.exp(-x)) + (1 - early) / (1 + math.exp(-slower * (x - later)))

    while high - low > 1e-14:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < 0.5 else (low, middle)
    return at(2 * math.log(3) + low)


def test_values_worked_by_hand():
    # At 3 C_mid with B = 2: log-logistic 1/(1 + 1/9) = .9; Weibull 1 - 2^-9; Frechet 2^(-1/9);
    # power law 1 - 1/18; Gompertz 2^(-e^-4); Burr 1 - 28^(-1/2); ramp 9/2, so 1; the mixtures by bisection.
    shares = {"log_logistic": 0.9, "weibull": 1 - 2**-9, "frechet": 2 ** (-1 / 9)}
    shares |= {"power_law": 17 / 18, "gompertz": 2 ** -math.exp(-4), "burr": 1 - 28**-0.5, "ramp": 1.0}
    shares |= {"two_speeds": mixture(0.65, 5.0, 0.6), "burst": mixture(0.5, 10.0, 0.3)}
    for family in ALL:
        value = float(Curve(family, A=1.0, B=2.0, C_mid=100.0, R_0=0.0)(300.0))
        assert value == pytest.approx(shares[family.name], rel=1e-12)


def test_the_power_law_is_the_bare_one_above_r_0():
    # A - D / C^B with D = (A - R_0) C_mid^B / 2, and R_0 where that would be lower.
    curve = Curve(POWER_LAW, A=0.7, B=0.5, C_mid=400.0, R_0=0.3)
    C = np.array([150.0, 400.0, 1000.0, 1e5])
    np.testing.assert_allclose(curve(C), 0.7 - 0.2 * 20 / C**0.5, rtol=1e-13)
    assert float(curve(50.0)) == 0.3


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_slopes_are_the_derivatives_and_inverse_inverts(family):
    b, x, h = 1.7, np.linspace(-0.35, 1.4, 14), 1e-5
    share, by_log_b, by_log_c = family.slopes(b, x)
    np.testing.assert_allclose(share, family.share(b, x), rtol=1e-14)
    numeric = (family.share(b * np.exp(h), x) - family.share(b * np.exp(-h), x)) / (2 * h)
    np.testing.assert_allclose(by_log_b, numeric, rtol=1e-7, atol=1e-9)
    numeric = (family.share(b, x + h) - family.share(b, x - h)) / (2 * h)
    np.testing.assert_allclose(by_log_c, numeric, rtol=1e-7, atol=1e-9)
    below = share < 1.0  # a ramp ends
    np.testing.assert_allclose(family.inverse(b, share)[below], x[below], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_derivative_is_gain_per_unit_of_compute(family):
    curve = Curve(family, A=0.61, B=1.92, C_mid=2542.0, R_0=0.40)
    C = np.array([2000.0, 2542.0, 9000.0])
    numeric = (curve(C + 0.1) - curve(C - 0.1)) / 0.2
    # The curve depends on log C - log C_mid: its slope in log C is minus that by log C_mid.
    np.testing.assert_allclose(-curve.jacobian(np.log(C))[:, 2] / C, numeric, rtol=1e-6)


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_compute_to_reach_a_pass_rate(family):
    curve = Curve(family, A=0.645, B=1.70, C_mid=10909.0, R_0=0.40)
    for compute in (8000.0, 10909.0, 50000.0 if family.name != "ramp" else 16000.0):
        assert curve.inverse(float(curve(compute))) == pytest.approx(compute, rel=1e-4)
    assert curve.inverse(0.40) == 0.0
    assert curve.inverse(0.645) == math.inf


def test_log_logistic_equals_the_papers_formula():
    C = np.array([150.0, 1000.0, 2542.0, 8000.0, 16000.0])
    R_0, A, B, C_mid = 0.40, 0.610, 1.92, 2542.0
    expected = R_0 + (A - R_0) / (1 + (C_mid / C) ** B)
    np.testing.assert_allclose(Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(C), expected, rtol=1e-13)


def test_a_curve_prints_the_name_for_people():
    assert str(Curve(ALL[0], 0.61, 1.92, 2542.0, 0.40)) == "log-logistic: A 0.61  B 1.92  C_mid 2542  R_0 0.4"
