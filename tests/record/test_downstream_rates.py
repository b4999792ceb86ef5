"""The rates of a downstream suite, and their intervals."""

import numpy as np
import pytest

from scalerl.record.downstream import SuiteResult, last_of_each


def test_rates_of_one_sample_have_wilsons_interval():
    found = SuiteResult.of("aime", 5, [1] * 12 + [0] * 18, 1)
    # 12 of 29 (30 prompts less the degree of freedom of their scatter), z = 1.96, by hand.
    assert found.pass_rate == found.pass_at_k == pytest.approx(0.4)
    assert found.pass_rate_interval == found.pass_at_k_interval
    assert found.pass_rate_interval == pytest.approx((0.24374, 0.57965), abs=2e-5)


def test_nothing_solved_has_the_interval_of_so_many_prompts():
    found = SuiteResult.of("aime", 5, [0] * 30, 8)
    assert found.pass_rate_interval == pytest.approx((0.0, 0.11351), abs=2e-5)  # 3.8415 / 33.8415


def test_completions_of_one_prompt_do_not_count_as_independent():
    alike = SuiteResult.of("aime", 5, [8] * 12 + [0] * 18, 8).pass_rate_interval
    apart = SuiteResult.of("aime", 5, [3] * 15 + [4] * 15, 8).pass_rate_interval
    assert alike[1] - alike[0] > 0.3
    assert apart[1] - apart[0] < 0.15


def test_intervals_hold_over_sets_of_prompts():
    draw = np.random.default_rng(0)
    for a, b in ((0.4, 1.0), (2.0, 2.0), (0.2, 4.0)):
        inside = 0
        for _ in range(400):
            correct = draw.binomial(8, draw.beta(a, b, 30))
            low, high = SuiteResult.of("", 0, correct, 8).pass_rate_interval
            inside += low <= a / (a + b) <= high
        assert 0.91 <= inside / 400 <= 0.99, (a, b, inside)


def test_lines_of_another_form_are_passed_over():
    good = {"suite": "a", "step": 3, "n_samples": 2, "correct": [1, 2]}
    odd = [good | {"n_samples": 0}, good | {"correct": []}, good | {"correct": [3]}, good | {"step": None}]
    found = last_of_each([good, *odd, good | {"step": 6, "correct": [0, 2]}])
    assert {name: result.step for name, result in found.items()} == {"a": 6}
    assert found["a"].pass_at_k == 0.5
