"""The comparison of two recordings of a run: what it lets pass, and what it does not."""

from dataclasses import replace

import numpy as np
import pytest
from lockstep import EDGE, edges, first_difference, sampler
from weight_arrays import arrays, stream

from scalerl.rl.learner.load import load_learner


@pytest.fixture(scope="module")
def small_logits(tiny_recipe, save_model):
    return replace(tiny_recipe, model=save_model("llama", initializer_range=0.2))


@pytest.fixture(scope="module")
def weights(small_logits):
    return load_learner(small_logits, small_logits.model).weights()


@pytest.fixture(scope="module")
def sample(small_logits):
    """A function that samples 400 completions by some weights."""
    recipe = small_logits

    def by(weights):
        generator = sampler(recipe, weights, rows=400)
        for prompt in recipe.task.prompts("train")[:100]:
            generator.submit(prompt, 0, 4)
        return [rollout for group in generator.collect(100) for rollout in group]

    return by


@pytest.fixture(scope="module")
def rollouts(sample, weights):
    return sample(weights)


@pytest.fixture(scope="module")
def away(small_logits, weights, rollouts):
    """By rollout, how far the draw of each token is from the nearest edge; those of inserted ones are far."""

    generator = sampler(small_logits, weights)

    def of(rollout):
        edge_TV, draw_T = edges(small_logits, generator, rollout)
        return np.where(rollout.sampled_T, np.abs(edge_TV - draw_T[:, None]).min(-1), np.inf)

    return [of(rollout) for rollout in rollouts]


def rounded_otherwise(weights, size):
    """The weights, each off by a part of itself that is of this `size`."""
    draw = np.random.default_rng(0)
    off = {name: 1 + size * draw.standard_normal(weight.shape) for name, weight in arrays(weights).items()}
    return stream({n: (weight * off[n]).astype(np.float32) for n, weight in arrays(weights).items()})


def flipped(rollout, at, token):
    """A rollout with another token in one place."""
    token_T = rollout.token_T.copy()
    token_T[at] = token
    return replace(rollout, token_T=token_T)


def test_the_same_tokens_are_no_difference(small_logits, weights, rollouts, sample):
    again = sample(weights)
    assert all(
        first_difference(small_logits, weights, *pair) is None for pair in zip(rollouts, again, strict=True)
    )


def test_weights_that_are_off_by_rounding_flip_a_draw_beside_an_edge(
    small_logits, weights, rollouts, away, sample
):
    """Of thousands of draws some are so near to an edge that weights which are off by a few parts in a
    million give another token; which, and how near, is told."""
    found, size = [], 2.0**-21
    while not found:
        size *= 2
        assert size < 1e-5, "nothing flipped"
        pairs = zip(sample(rounded_otherwise(weights, size)), rollouts, strict=True)
        told = [
            (i, other, first_difference(small_logits, weights, other, r))
            for i, (other, r) in enumerate(pairs)
        ]
        found = [x for x in told if x[2] is not None]
    for i, other, difference in found:
        print(f"\n{difference}; weights off by {size:.1e} of themselves")
        rollout, at = rollouts[i], difference.at
        assert difference.away < EDGE
        assert difference.away == pytest.approx(away[i][at], abs=1e-12)
        np.testing.assert_array_equal(other.token_T[:at], rollout.token_T[:at])
        assert difference.tokens == (other.token_T[at], rollout.token_T[at])
        assert f"{rollout.prompt.id}, completion {rollout.sample}, token {at}: " in str(difference)


def test_another_token_in_the_middle_of_an_interval_is_no_rounding(small_logits, weights, rollouts, away):
    rollout = rollouts[0]
    at = int(np.where(rollout.sampled_T, away[0], 0).argmax())
    wrong = flipped(rollout, at, rollout.token_T[at] - 1)
    with pytest.raises(AssertionError, match=rf"token {at}: .* which is more than rounding"):
        first_difference(small_logits, weights, wrong, rollout)


def test_beside_an_edge_only_its_other_side_is_rounding(small_logits, weights, rollouts, away):
    """A draw that is near to one edge has not fallen beyond another."""
    i = min(range(len(away)), key=lambda i: away[i].min())
    rollout, at = rollouts[i], int(away[i].argmin())
    edge_TV, draw_T = edges(small_logits, sampler(small_logits, weights), rollout)
    token = int(rollout.token_T[at])
    beside = token + 1 if edge_TV[at, token] - draw_T[at] < EDGE else token - 1
    found = first_difference(small_logits, weights, flipped(rollout, at, beside), rollout)
    assert found.at == at
    beyond = 2 * token - beside
    with pytest.raises(AssertionError, match="more than rounding"):
        first_difference(small_logits, weights, flipped(rollout, at, beyond), rollout)


def test_a_completion_that_ends_where_the_other_goes_on_is_no_rounding(small_logits, weights, rollouts):
    rollout = rollouts[0]
    short = replace(rollout, token_T=rollout.token_T[:-1])
    with pytest.raises(AssertionError, match="one ends where the other goes on"):
        first_difference(small_logits, weights, short, rollout)
