"""What more compute would bring."""

import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.answers import identify
from scalerl.curve.worth import Outlook, identified_at
from scalerl.errors import InputError
from scalerl.view.facts.fit_rows import fit_rows

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 3000.0, 0.4)


def slope(compute):
    return (float(TRUTH(compute + 1)) - float(TRUTH(compute - 1))) / 2


def run_to(top, n=30, sd=0.001, seed=0):
    compute_N = np.linspace(0, top, n)
    return fit(Points.from_arrays(compute_N, TRUTH(compute_N) + np.random.default_rng(seed).normal(0, sd, n)))


def test_gain_per_unit_is_the_derivative_of_the_curve():
    late = run_to(15_000.0)
    for compute in (2000.0, 15_000.0):
        assert late.gain_per_unit(compute) == pytest.approx(slope(compute), rel=0.15)
    assert late.gain_per_unit(0.0) == 0.0


def test_stop_where_a_further_unit_gains_less_than_its_worth():
    late = run_to(15_000.0)
    worth = slope(20_000.0)
    assert late.stop_at(worth) == pytest.approx(20_000.0, rel=0.15)
    assert late.gain_per_unit(late.stop_at(worth)) == pytest.approx(worth, rel=1e-3)
    assert late.stop_at(1.0) == 15_000.0
    assert run_to(5000.0).stop_at(slope(160_000.0)) == math.inf
    with pytest.raises(InputError, match="above 0"):
        late.stop_at(0.0)


def test_what_may_decline_is_stopped_where_it_is_expected_to_gain_no_more():
    """A trend with .1 % of the posterior lowers the mean curve where all that rises is at its ceiling."""
    late = run_to(15_000.0, seed=4)
    place = late.stop_at(1e-12)
    assert 15_000 < place < 480_000
    assert late.gain_per_unit(0.95 * place) > 0 > late.gain_per_unit(1.05 * place)
    assert fit(late.points, prior="flat").stop_at(1e-12) == math.inf  # under which nothing falls


def test_the_expected_width_is_that_of_runs_that_went_on():
    """Held against fits of runs that follow draws of the posterior, evaluated at the same spacing."""
    early = run_to(5000.0, n=26, sd=0.004)
    assert not early.identified
    widths = early.expected_width(np.array([5200.0, 9000.0, 15_000.0]))
    assert np.all(np.diff(widths) < 0)
    assert widths[0] == pytest.approx(early.intervals.A[1] - early.intervals.A[0], rel=0.2)
    compute_N, found = np.arange(0, 15_001, 200.0), []
    draws, rng = early.posterior.draws(8), np.random.default_rng(1)
    for curve_N in draws.curves_at(compute_N[26:]):
        further_N = np.clip(curve_N + rng.normal(0, early.noise.sd, len(curve_N)), 0, 1)
        low, high = fit(Points.from_arrays(compute_N, [*early.points.pass_rate_N, *further_N])).intervals.A
        found.append(high - low)
    assert widths[2] == pytest.approx(np.mean(found), rel=0.6)


def test_compute_to_identify():
    early, late = run_to(5000.0, n=26, sd=0.004), run_to(15_000.0)
    tell = early.compute_to_identify
    assert tell is not None
    assert 5000 < tell < 15_000
    assert late.compute_to_identify == 15_000.0


def test_the_compute_to_identify_is_where_the_last_condition_is_met():
    """Not the next one of sixteen places: it would leap by 14 % from one evaluation to the next."""
    early = run_to(5000.0, n=26, sd=0.004)
    seen, known = early.identification, -math.inf

    def told(outlook_at):
        return identified_at(outlook_at, seen, early.sample)

    for place in np.geomspace(6000, 38_000, 9):
        wide = told(lambda c, p=place: Outlook(seen.widest * (p / c), known, known))
        middle = told(lambda c, p=place: Outlook(0.0, math.log(p / 1.5), known))
        high = told(lambda c, p=place: Outlook(0.0, known, math.log(p)))
        assert [wide, middle, high] == pytest.approx([place] * 3, rel=0.01)
    assert told(lambda c: Outlook(seen.widest * (50_000 / c), known, known)) is None


def test_a_second_late_midpoint_moves_the_compute_to_identify_by_its_weight_alone():
    """Of 2 or 3 % of the posterior: the interval of C_mid so far takes it in at once, and doubles."""
    early = run_to(3600.0, n=24, sd=0.008)
    post, told, high = early.posterior, [], []
    beyond = post.log_mid_cells - early.sample.log_c_range[1]
    late, near = beyond > 1.2, beyond < 0.3
    for mass in (0.02, 0.03):
        wanted = [post.weight_cells[part].sum() for part in (late, near, ~late & ~near)]
        change = np.log(np.array([mass, 1 - mass, 1e-9]) / wanted)
        moved = np.select([late, near], change[:2], change[2])
        other = post.reweighted(post.log_weight + moved[:, None, None])
        seen = identify(other, early.sample, "", 0.95)
        told.append(replace(early, posterior=other, identification=seen).compute_to_identify)
        high.append(3600.0 / seen.ratio_interval[0])
    assert high[1] > 2 * high[0]
    assert told[1] == pytest.approx(told[0], rel=0.2)


def test_too_few_evaluations_are_waited_for():
    """The ceiling of six is never called identified, however narrow its interval: eight take 1.4 times."""
    few = run_to(14_000.0, n=6)
    assert few.intervals.A[1] - few.intervals.A[0] < few.identification.widest
    assert few.compute_to_identify == pytest.approx(14_000 * 7 / 5)


def test_no_compute_is_named_where_it_is_not_compute_that_is_missing():
    """As of a run that has wandered off its curve: a narrower interval would not identify its ceiling."""
    early = run_to(5000.0, n=26, sd=0.004)
    assert "identified from" in dict(fit_rows(early))
    wandered = replace(early, identification=replace(early.identification, waits=False))
    assert wandered.compute_to_identify is None
    assert "identified from" not in dict(fit_rows(wandered))
