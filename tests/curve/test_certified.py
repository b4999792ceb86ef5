"""Fits and standard errors against certified and documented ones, digit by digit.

Responses are mapped into [0, 1] (`unit` to 1, a decreasing one turned round), and so are their curves, which
changes nothing but the scale: no bound is reached. The references have none.

Sources:
  NIST StRD, nonlinear regression, Rat42 (Ratkowsky 1983): itl.nist.gov/div898/strd/nls/data/ratkowsky2.shtml.
  R's drc, data `ryegrass` (Inderjit, Streibig and Olofsdotter 2002) and the output that its reference pages
    show: LL.4 (print.summary.drc, ED.drc), W1.4 and W2.4 (anova.drc, mselect and maED).
  R's stats, data `ChickWeight` and `DNase`, output as in R's own tests (tests/Examples/stats-Ex.Rout.save):
    SSfpl, SSweibull and SSgompertz; SSlogis as printed by example(nls).
"""

import math

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Family, Frechet, Points, Weibull
from scalerl.curve.least_squares import LeastSquares, least_squares
from scalerl.curve.sample import Sample, make_sample
from scalerl.forecast.standard_errors import standard_errors

RAT42_X = [9, 14, 21, 28, 42, 57, 63, 70, 79]
RAT42_Y = [8.93, 10.80, 18.59, 22.33, 39.35, 56.11, 61.73, 64.62, 67.08]

RYEGRASS = {  # concentration: root lengths
    0: [7.58, 8.0, 8.328571429, 7.25, 7.375, 7.9625],
    0.94: [8.355555556, 6.914285714, 7.75],
    1.88: [6.871428571, 6.45, 5.922222222],
    3.75: [1.925, 2.885714286, 4.233333333],
    7.5: [1.1875, 0.857142857, 1.057142857],
    15: [0.6875, 0.525, 0.825],
    30: [0.25, 0.22, 0.44],
}

CHICK_TIME = np.array([0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21])
CHICK_1 = [42, 51, 59, 64, 76, 93, 106, 125, 149, 171, 199, 205]
CHICK_6 = [41, 49, 59, 74, 97, 124, 141, 148, 155, 160, 160, 157]

DNASE_CONC = np.repeat([0.04882812, 0.1953125, 0.390625, 0.78125, 1.5625, 3.125, 6.25, 12.5], 2)
DNASE_DENSITY = [0.017, 0.018, 0.121, 0.124, 0.206, 0.215, 0.377, 0.374, 0.614, 0.609, 1.019, 1.001, 1.334]
DNASE_DENSITY += [1.364, 1.73, 1.71]


def fitted(
    compute_N, y_N, unit: float, family: Family, r0: float | None = None
) -> tuple[Sample, LeastSquares]:
    points = Points.from_arrays(compute_N, np.asarray(y_N, dtype=float) / unit)
    sample = make_sample(points, r0)
    return sample, least_squares(sample, family)


def ryegrass(family: Family) -> tuple[Sample, LeastSquares, Curve]:
    """The decreasing fit as the rising one of 10 - y; with the curve of 10 - y."""
    conc_N = np.repeat(list(RYEGRASS), [len(lengths) for lengths in RYEGRASS.values()])
    sample, best = fitted(conc_N, 10 - np.concatenate(list(RYEGRASS.values())), 10, family)
    curve = best.curve
    return sample, best, Curve(family, 10 * curve.A, curve.B, curve.C_mid, 10 * curve.R_0)


def hessian(sample: Sample, curve: Curve) -> np.ndarray:
    """Half the second derivatives (4, 4) of the sum of squares by (A, log B, log C_mid, R_0)."""

    def gradient(at_4: np.ndarray) -> np.ndarray:
        moved = Curve(curve.family, at_4[0], math.exp(at_4[1]), math.exp(at_4[2]), at_4[3])
        # The rows are means of replicates: their scatter about the means has no derivative.
        left_N = sample.weight_N * (moved.at_log(sample.log_c_N) - sample.y_N)
        return moved.jacobian(sample.log_c_N).T @ left_N

    at_4 = np.array([curve.A, math.log(curve.B), math.log(curve.C_mid), curve.R_0])
    return np.array([(gradient(at_4 + h) - gradient(at_4 - h)) / 2e-5 for h in 1e-5 * np.eye(4)])


def digits(found: float, printed: str) -> None:
    """`found` rounds to the number as it was printed, to one unit of its last digit."""
    last = 10.0 ** -len(printed.partition(".")[2])
    assert found == pytest.approx(float(printed), rel=0, abs=last), printed


def test_nist_rat42():
    # y = b1 / (1 + exp(b2 - b3 x)): log-logistic with R_0 = 0, C = e^x, A = b1, B = b3, C_mid = exp(b2 / b3)
    sample, best = fitted(np.exp(RAT42_X), RAT42_Y, 100, LOG_LOGISTIC, r0=0.0)
    curve = best.curve
    b1, b2, b3 = 100 * curve.A, curve.B * math.log(curve.C_mid), curve.B
    np.testing.assert_allclose((b1, b2, b3), (7.2462237576e1, 2.6180768402e0, 6.7359200066e-2), rtol=2e-9)
    assert 1e4 * best.rss == pytest.approx(8.0565229338, rel=1e-10)
    errors = standard_errors(sample, best)
    by_b2 = np.array([math.log(curve.C_mid), curve.B / curve.C_mid])
    b2_error = math.sqrt(by_b2 @ errors.covariance_44[1:3, 1:3] @ by_b2)
    found = (100 * errors.A, b2_error, errors.B, 100 * errors.sd)
    certified = (1.7340283401e0, 8.8295217536e-2, 3.4465663377e-3, 1.1587725499e0)
    np.testing.assert_allclose(found, certified, rtol=5e-9)
    assert errors.degrees == 6
    assert math.isnan(errors.R_0)


def test_drc_ll4_ryegrass():
    # y = c + (d - c) / (1 + exp(b (log x - log e))), decreasing: A = -c, R_0 = -d, B = b, C_mid = e
    sample, best, curve = ryegrass(LOG_LOGISTIC)
    for found, printed in zip(
        (curve.B, 10 - curve.A, 10 - curve.R_0, curve.C_mid),
        ("2.98222", "0.48141", "7.79296", "3.05795"),
        strict=True,
    ):
        digits(found, printed)
    errors = standard_errors(sample, best)
    digits(10 * errors.sd, "0.5196256")
    assert errors.degrees == 20
    # By the observed Hessian: with the second derivatives of the curve, which nls leaves out.
    A, B, C_mid, R_0 = np.sqrt(np.diag(np.linalg.inv(hessian(sample, best.curve)))) * 10 * errors.sd
    for found, printed in zip(
        (B * curve.B / 10, A, R_0, C_mid * curve.C_mid / 10),
        ("0.46506", "0.21219", "0.18857", "0.18573"),
        strict=True,
    ):
        digits(found, printed)
    assert pytest.approx(0.4584, abs=5e-5) == errors.B


@pytest.mark.parametrize(
    ("family", "variance", "ed10", "ed50", "ed90"),
    [
        (LOG_LOGISTIC, "0.2700107", 1.463706, 3.057955, 6.388640),
        (Weibull(), "0.3012075", 1.405979, 3.088964, 5.101022),  # W1.4
        (Frechet(), "0.2646283", 1.628278, 2.996913, 7.805803),  # W2.4
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_drc_effective_doses_of_three_families(family, variance, ed10, ed50, ed90):
    sample, best, curve = ryegrass(family)
    digits(100 * standard_errors(sample, best).sd ** 2, variance)
    doses = [curve.inverse(curve.R_0 + share * (curve.A - curve.R_0)) for share in (0.1, 0.5, 0.9)]
    # drc stops its search early (optim, relative tolerance 1e-8 of the sum of squares): 5 digits
    np.testing.assert_allclose(doses, (ed10, ed50, ed90), rtol=7e-5)
    assert curve.C_mid == pytest.approx(doses[1], rel=1e-12)


def test_r_ssfpl_chick_1():
    # y = A + (B - A) / (1 + exp((xmid - x) / scal)): R_0 = A, A = B, C = e^x, B = 1 / scal, C_mid = e^xmid
    sample, best = fitted(np.exp(CHICK_TIME), CHICK_1, 400, LOG_LOGISTIC)
    curve, errors = best.curve, standard_errors(sample, best)
    for found, printed in zip(
        (400 * curve.R_0, 400 * curve.A, math.log(curve.C_mid), 1 / curve.B),
        ("27.453", "348.971", "19.391", "6.673"),
        strict=True,
    ):
        digits(found, printed)
    for found, printed in zip(
        (
            400 * errors.R_0,
            400 * errors.A,
            errors.C_mid / curve.C_mid,
            errors.B / curve.B**2,
            400 * errors.sd,
        ),
        ("6.601", "57.899", "2.194", "1.002", "2.351"),
        strict=True,
    ):
        digits(found, printed)
    assert errors.degrees == 8


def test_r_ssweibull_chick_6():
    # y = Asym - Drop exp(-exp(lrc) x^pwr): A = Asym, R_0 = Asym - Drop, B = pwr, C_mid^B = ln 2 / e^lrc
    sample, best = fitted(CHICK_TIME[1:], CHICK_6[1:], 300, Weibull())
    curve, errors = best.curve, standard_errors(sample, best)
    lrc = math.log(math.log(2)) - curve.B * math.log(curve.C_mid)
    gain = 300 * (curve.A - curve.R_0)
    for found, printed in zip(
        (300 * curve.A, gain, lrc, curve.B), ("158.5012", "110.9971", "-5.9934", "2.6461"), strict=True
    ):
        digits(found, printed)
    v = errors.covariance_44
    gain_error = 300 * math.sqrt(v[0, 0] + v[3, 3] - 2 * v[0, 3])
    by_lrc = -np.array([math.log(curve.C_mid), curve.B / curve.C_mid])
    lrc_error = math.sqrt(by_lrc @ v[1:3, 1:3] @ by_lrc)
    for found, printed in zip(
        (300 * errors.A, gain_error, lrc_error, errors.B, 300 * errors.sd),
        ("1.1769", "2.6330", "0.3733", "0.1613", "2.061"),
        strict=True,
    ):
        digits(found, printed)


def test_r_sslogis_dnase():
    # y = Asym / (1 + exp((xmid - log conc) / scal))
    sample, best = fitted(DNASE_CONC, DNASE_DENSITY, 3, LOG_LOGISTIC, r0=0.0)
    curve, errors = best.curve, standard_errors(sample, best)
    for found, printed in zip(
        (3 * curve.A, math.log(curve.C_mid), 1 / curve.B), ("2.34518", "1.48309", "1.04146"), strict=True
    ):
        digits(found, printed)
    for found, printed in zip(
        (3 * errors.A, errors.C_mid / curve.C_mid, errors.B / curve.B**2, 3 * errors.sd),
        ("0.07815", "0.08135", "0.03227", "0.01919"),
        strict=True,
    ):
        digits(found, printed)
    assert errors.degrees == 13  # 16 points: the replicates count


def test_r_ssgompertz_dnase():
    # y = Asym exp(-b2 b3^log(conc)) is the Frechet curve in conc: B = -log b3, C_mid^B = b2 / ln 2
    sample, best = fitted(DNASE_CONC, DNASE_DENSITY, 6, Frechet(), r0=0.0)
    curve, errors = best.curve, standard_errors(sample, best)
    b2 = math.log(2) * curve.C_mid**curve.B
    for found, printed in zip(
        (6 * curve.A, b2, math.exp(-curve.B)), ("4.60333", "2.27134", "0.71647"), strict=True
    ):
        digits(found, printed)
    by_b2 = b2 * np.array([math.log(curve.C_mid), curve.B / curve.C_mid])
    b2_error = math.sqrt(by_b2 @ errors.covariance_44[1:3, 1:3] @ by_b2)
    for found, printed in zip(
        (6 * errors.A, b2_error, errors.B * math.exp(-curve.B), 6 * errors.sd),
        ("0.65321", "0.14373", "0.02206", "0.02684"),
        strict=True,
    ):
        digits(found, printed)


def test_no_error_for_what_lies_on_a_bound():
    points = Points.from_arrays(np.linspace(0, 1000, 12), 0.2 + 0.0004 * np.linspace(0, 1000, 12))
    sample = make_sample(points, None)
    best = least_squares(sample, LOG_LOGISTIC)
    errors = standard_errors(sample, best)
    assert best.curve.A == 1.0
    assert math.isnan(errors.A)
    assert errors.degrees == 12 - 3
    assert errors.B > 0
