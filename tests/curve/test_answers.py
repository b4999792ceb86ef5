"""When a ceiling is identified."""

import numpy as np
import pytest

from scalerl.curve import Points, fit
from scalerl.numbers import amount_text, chance_text


def test_a_few_evaluations_identify_nothing_however_well_they_lie():
    """Seven of a run that reaches .606 at 2,400; its noise, learnt from them, would make it a no-go."""
    compute_N = np.arange(0.0, 700.0, 100.0)
    rate_N = np.array([0.3048, 0.3136, 0.3296, 0.3597, 0.3905, 0.4108, 0.4201])
    result = fit(Points.from_arrays(compute_N, rate_N))
    assert not result.identified
    chance = result.chance(0.5, 2400.0)
    assert chance.verdict == "too early"
    assert result.why in chance.why
    assert chance.answer == f"TOO EARLY, {chance_text(chance.probability)}"


@pytest.mark.parametrize("n", [6, 7])
def test_a_few_evaluations_give_a_verdict_where_the_forecast_is_far_from_the_target(n):
    """It is about the budget, as ever; 985 of 985 such calls of simulated runs of one rise were right."""
    compute_N = np.arange(n) * 100.0
    rate_N = 0.3 + 0.3 / (1 + (150 / np.maximum(compute_N, 1e-9)) ** 2) + 0.002 * np.cos(7 * compute_N)
    result = fit(Points.from_arrays(compute_N, rate_N))
    assert not result.identified
    assert [result.verdict(target, 1000.0) for target in (0.45, 0.9)] == ["go", "no-go"]
    low, high = result.forecast(1000.0).interval
    assert result.verdict((low + high) / 2, 1000.0) == "too early"


def test_a_ceiling_that_will_not_be_known_in_time_is_said_with_the_probability():
    compute_N = np.arange(0.0, 1200.0, 100.0)
    rate_N = 0.3 + 0.4 / (1 + 1500 / np.maximum(compute_N, 1e-9)) + 0.004 * np.cos(7 * compute_N)
    result = fit(Points.from_arrays(compute_N, rate_N))
    budget = 2000.0
    assert not result.identified
    assert (result.compute_to_identify or np.inf) > budget
    target = result.forecast(budget).median
    chance = result.chance(target, budget)
    assert chance.why == (
        "the ceiling will probably not be known within the budget of "
        f"{amount_text(result.axis, budget)}; the pass rate reaches {target:g} there with probability "
        f"{chance_text(chance.probability)}"
    )
    assert result.chance(target, 20000.0).answer.startswith("TOO EARLY, ")
