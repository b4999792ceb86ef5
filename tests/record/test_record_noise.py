import numpy as np
import pytest

from scalerl.record.evaluation import EvalPoint, mean_p_1mp


def test_mean_p_1mp_by_hand():
    # Of 4 samples 0, 1, 2 and 4 correct: x (4 - x) / 12 = 0, 3/12, 4/12, 0.
    assert mean_p_1mp(np.array([0, 1, 2, 4]), 4) == pytest.approx(7 / 48)
    assert np.isnan(mean_p_1mp(np.array([0, 1]), 1))


@pytest.mark.parametrize("n_samples", [2, 4, 16])
def test_mean_p_1mp_is_unbiased(n_samples):
    rng = np.random.default_rng(n_samples)
    p_P = rng.beta(0.5, 0.5, size=50)  # mostly near 0 and 1, where the naive estimate is most wrong
    truth = (p_P * (1 - p_P)).mean()
    found = np.array([mean_p_1mp(rng.binomial(n_samples, p_P), n_samples) for _ in range(4000)])
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - truth) < 4 * error
    # The naive estimate, smaller by (n - 1) / n, would have been noticed.
    assert truth / n_samples > 8 * error


def test_noise_sd_is_that_of_the_pass_rate():
    rng = np.random.default_rng(0)
    p_P = rng.uniform(size=40)
    rates = rng.binomial(8, p_P, size=(20_000, 40)).mean(axis=1) / 8
    point = EvalPoint(0, 0.5, n_prompts=40, n_samples=8, mean_p_1mp=float((p_P * (1 - p_P)).mean()))
    assert point.noise_sd == pytest.approx(rates.std(), rel=0.03)
