"""Batches that a tiny model sampled."""

import pytest

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.types import Group, Reward


@pytest.fixture(scope="session")
def sampled_batches(make_generator, uneven_prompts):
    """A function that makes `n` batches of completions that a model sampled, of 1 to 40 tokens each."""

    def make(folder, n):
        batches = []
        for seed in range(n):
            generator = make_generator(folder, temperature=0.8, seed=seed)
            for prompt in uneven_prompts[:3]:
                generator.submit(prompt, 0, 4)
            groups = [
                Group.of(rollouts, [Reward(1.0 if r.token_T.sum() % 2 else -1.0, True) for r in rollouts])
                for rollouts in generator.collect(3)
            ]
            batches.append(make_batch(groups, BatchStd(), PromptAverage(), 100))
        return batches

    return make
