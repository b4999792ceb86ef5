"""When a ceiling is identified."""

import numpy as np

from scalerl.curve import Points, fit


def test_a_few_evaluations_identify_nothing_however_well_they_lie():
    """Seven of a run that reaches .606 at 2,400; its noise, learnt from them, would make it a no-go."""
    compute_N = np.arange(0.0, 700.0, 100.0)
    rate_N = np.array([0.3048, 0.3136, 0.3296, 0.3597, 0.3905, 0.4108, 0.4201])
    result = fit(Points.from_arrays(compute_N, rate_N))
    assert not result.identified
    chance = result.chance(0.5, 2400.0)
    assert (chance.verdict, chance.answer, chance.why) == ("too early", "TOO EARLY", result.why)
