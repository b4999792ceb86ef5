import math

import numpy as np
import pytest

from scalerl.curve import FAMILIES
from scalerl.curve.posterior import Draws
from scalerl.forecast.crossing import find_crossing


def curves(A, C_mid, B=2.0, R_0=0.4):
    """Log-logistic curves, one for each A."""
    A_n = np.atleast_1d(np.asarray(A, dtype=float))
    log_B_n, log_C_n, R_0_n = (np.full(len(A_n), value) for value in (math.log(B), math.log(C_mid), R_0))
    zeros_n = np.zeros(len(A_n))
    return Draws(FAMILIES, zeros_n.astype(int), A_n, log_B_n, log_C_n, R_0_n, zeros_n, zeros_n, (0.0, 1.0))


def test_a_crossing_by_hand():
    # .2 / (1 + (2/C)^2) = .25 / (1 + (4/C)^2) in thousands: .2 (C^2 + 16) = .25 (C^2 + 4), so C^2 = 44.
    found = find_crossing(curves(0.6, 2000), curves(0.65, 4000), ("early", "late"), (100, 80_000), 0.95)
    assert found.probability == 1.0
    assert found.compute == pytest.approx(1000 * math.sqrt(44), rel=0.005)
    assert (found.before, found.after) == ("early", "late")
    assert (found.ahead_first, found.ahead_last) == (0.0, 1.0)


def test_curves_that_do_not_cross():
    found = find_crossing(curves(0.6, 2000), curves(0.65, 2000), ("low", "high"), (100, 80_000), 0.95)
    assert (found.probability, found.ahead_first, found.ahead_last) == (0.0, 1.0, 1.0)
    assert found.compute is found.interval is found.before is found.after is None


def test_a_lead_too_small_to_count_is_none():
    # They do cross, .2 (1 + 4.1616 / C^2) = .204 (1 + 4 / C^2) at C^2 = 4.08, but never part by .005.
    found = find_crossing(curves(0.600, 2000), curves(0.604, 2040), ("a", "b"), (100, 80_000), 0.95)
    assert (found.probability, found.ahead_first, found.ahead_last) == (0.0, 0.0, 0.0)


def test_probability_and_interval_over_draws():
    # Ceilings .58, .65 and .70 against .6: the first never catches up, the others do, the higher the sooner.
    # .25: C^2 = 44 as above. .30: .2 (C^2 + 16) = .3 (C^2 + 4), C^2 = 20.
    found = find_crossing(
        curves([0.6] * 3, 2000), curves([0.58, 0.65, 0.70], 4000), ("early", "late"), (100, 80_000), 0.95
    )
    assert found.probability == pytest.approx(2 / 3)
    assert found.ahead_last == pytest.approx(2 / 3)
    assert found.interval
    low, high = found.interval
    assert 1000 * math.sqrt(20) < low < high < 1000 * math.sqrt(44)
    assert (low, high) == pytest.approx((4472 * 1.0097, 6633 / 1.0097), rel=0.005)
