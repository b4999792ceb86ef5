from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import learner_work
from scalerl.rl.fsdp.settings import Fsdp2
from scalerl.rl.setup import load_learner


def plain(recipe, batches):
    learner = load_learner(recipe, recipe.model)
    trace = [
        (learner.step(batch), learner_work.log_probs(learner, batch) if len(batch) else None)
        for batch in batches
    ]
    return trace, learner.weights()


def assert_equal(found, expected, tolerance=1e-6):
    """Stats and log-probabilities of every step."""
    for i, ((stats, logp), (stats_before, logp_before)) in enumerate(zip(found, expected, strict=True)):
        for name, value in asdict(stats).items():
            other = asdict(stats_before)[name]
            assert value == pytest.approx(other, rel=tolerance, abs=tolerance, nan_ok=True), (i, name)
        if logp is not None:
            assert (logp - logp_before).abs().max() < tolerance, i


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_twenty_steps_are_those_of_one_process(ranks, fsdp_recipe, sampled_batches, n_ranks, packed):
    batches = sampled_batches(fsdp_recipe.model, 5) * 4
    expected, _ = plain(fsdp_recipe, batches)
    results = ranks(n_ranks, learner_work.train, fsdp_recipe, batches, Fsdp2(packed=packed, chunk=50))
    for found, _ in results:
        gaps = [float((a[1] - b[1].detach()).abs().max()) for a, b in zip(found, expected) if a[1] is not None]
        print(["%.1e" % g for g in gaps])
    for found, _ in results:
        assert_equal(found, expected)
