import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from weight_arrays import arrays

from scalerl.rl.algo.curriculum import NoPositiveResampling
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.settings import BatchSize
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.types import Reward

P = 2  # groups a step of the recipe


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    return tiny_recipe


class Watched:
    """A generator that notes what passes: groups in and out, versions, and the tickets that are out."""

    def __init__(self, generator):
        self.generator = generator
        self.submitted, self.collected, self.tickets, self.updates = [], [], [], []

    def submit(self, prompt, epoch, n_samples):
        self.submitted.append((prompt.id, epoch))
        # A ticket is out from admission until the weights of the step that consumed it are installed.
        self.tickets.append(len(self.submitted) - P * self.generator.installed)
        return self.generator.submit(prompt, epoch, n_samples)

    @property
    def ready(self):
        return self.generator.ready

    @property
    def installed(self):
        return self.generator.installed

    @property
    def counters(self):
        return self.generator.counters

    @property
    def in_flight(self):
        return self.generator.in_flight

    def state(self):
        return self.generator.state()

    def restore(self, state):
        self.generator.restore(state)

    def close(self):
        self.generator.close()

    def work(self):
        self.generator.work()

    def take(self, n_groups):
        groups = self.generator.take(n_groups)
        self.collected += [(rollouts[0].prompt.id, rollouts[0].epoch) for rollouts in groups]
        return groups

    def update(self, weights, version):
        assert version > self.generator.installed
        self.updates.append(version)
        self.generator.update(weights, version)


@pytest.fixture(scope="module")
def run(start_run, by_parity):
    """A function that gives the first `n_steps` steps, the generator and the learner."""

    def make(recipe, n_steps, verify=by_parity, seed=0):
        loop, generator, learner = start_run(recipe, verify, Watched, seed)
        return list(islice(loop, n_steps)), generator, learner

    return make


def weight_bytes(weights):
    return {name: w.tobytes() for name, w in arrays(weights).items()}


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_no_token_is_older_than_k_versions(run, recipe, k):
    steps, generator, _ = run(replace(recipe, schedule=PipelineRL(k=k)), 12)
    oldest = []
    for step in steps:
        before = step.index - 1  # the version that the step started from
        rollouts = [rollout for group in step.groups for rollout in group.rollouts]
        ages = np.concatenate([before - rollout.version_T for rollout in rollouts])
        assert (before - step.batch.version_NT[step.batch.sampled_NT] <= k).all()
        assert ages.min() >= 0
        oldest.append(int(ages.max()))
        # The same holds of the cache: no entry of it was made by older weights.
        assert all(before - rollout.first_version <= k for rollout in rollouts)
    assert len(steps) == 12
    assert max(oldest) == k  # short completions, admitted at once and finished soon, do wait for k steps
    lengths = [len(r.token_T) for step in steps for group in step.groups for r in group.rollouts]
    assert max(lengths) > 10 * min(lengths)
    assert max(generator.tickets) == (k + 1) * P


@pytest.mark.parametrize("k", [1, 4])
def test_off_policy_trains_k_batches_of_one_version(run, recipe, k):
    steps, generator, _ = run(replace(recipe, schedule=OffPolicy(k=k)), 12)
    for step in steps:
        versions = {int(v) for g in step.groups for r in g.rollouts for v in r.version_T}
        start_of_phase = (step.index - 1) // k * k
        assert versions == {start_of_phase}  # so that ages go 0, 1, ... k - 1
    assert generator.installed == 12
    assert max(generator.tickets) == k * P


@pytest.mark.parametrize("schedule", [OffPolicy(k=3), PipelineRL(k=2)])
def test_a_step_trains_the_groups_that_it_consumes(run, recipe, schedule):
    # A phase of OffPolicy has all of its groups at once: the batch of a step must be made of the next ones.
    kept = replace(recipe, schedule=schedule, zero_variance="keep", truncated="keep")
    steps, generator, _ = run(kept, 9)
    for step in steps:
        first = (step.index - 1) * P
        consumed = [(g.prompt.id, g.rollouts[0].epoch) for g in step.groups]
        assert consumed == generator.submitted[first : first + P]
        rollouts = [r for group in step.groups for r in group.rollouts]
        for token_T, length, rollout in zip(step.batch.token_NT, step.batch.length_N, rollouts, strict=True):
            assert token_T[:length].tolist() == [*rollout.prompt_T.tolist(), *rollout.token_T.tolist()]


@pytest.mark.parametrize(
    ("schedule", "versions"), [(OffPolicy(k=3), [3, 6, 9]), (PipelineRL(k=3), range(1, 10))]
)
def test_weights_are_published_at_the_end_of_a_phase_or_after_every_step(run, recipe, schedule, versions):
    _, generator, _ = run(replace(recipe, schedule=schedule), 9)
    assert generator.updates == list(versions)


def test_on_policy_is_one_run_whichever_schedule_names_it(run, recipe):
    steps, _, learner = run(replace(recipe, schedule=PipelineRL(k=0)), 6)
    others, _, other = run(replace(recipe, schedule=OffPolicy(k=1)), 6)
    assert weight_bytes(learner.weights()) == weight_bytes(other.weights())
    assert [s.batch.token_NT.tolist() for s in steps] == [s.batch.token_NT.tolist() for s in others]


def test_completions_in_flight_meet_several_versions(run, recipe):
    steps, _, _ = run(recipe, 12)
    rollouts = [r for step in steps for group in step.groups for r in group.rollouts]
    mixed = [r for r in rollouts if len(set(r.version_T.tolist())) > 1]
    assert len(mixed) > len(rollouts) / 10
    assert all((np.diff(r.version_T) >= 0).all() for r in rollouts)


def test_groups_are_consumed_in_order_of_admission(run, recipe):
    steps, generator, _ = run(recipe, 12)
    assert generator.collected == generator.submitted[: 12 * P]
    consumed = [(g.prompt.id, g.rollouts[0].epoch) for step in steps for g in step.groups]
    assert consumed == generator.collected
    assert all(len(group.rollouts) == 4 for step in steps for group in step.groups)


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_step_has_the_bytes_of_its_weights_in_their_own_dtype(run, recipe, precision, width):
    steps, _, learner = run(replace(recipe, precision=precision, schedule=OffPolicy(k=2)), 4)
    size = width * sum(parameter.numel() for parameter in learner.model.parameters())
    assert [step.sync.bytes for step in steps] == [0, size, 0, size]
    assert [step.sync.seconds > 0 for step in steps] == [False, True, False, True]
    assert [step.sync.update_seconds > 0 for step in steps] == [False, True, False, True]


def test_a_batch_without_signal_changes_nothing_but_the_version(start_run, by_parity, recipe):
    flat, calls = Reward(-1.0, False), []

    def flat_at_first(rollout):
        calls.append(rollout)
        return flat if len(calls) <= 2 * P * 4 else by_parity(rollout)

    loop, _, learner = start_run(recipe, flat_at_first)
    at_start = weight_bytes(learner.weights())
    for version in (1, 2):
        step = next(loop)
        assert (step.index, learner.version) == (version, version)
        assert (len(step.batch), step.batch.zero_variance) == (0, P)
        assert math.isnan(step.stats.loss)
        assert math.isnan(step.stats.grad_norm)
        assert (step.stats.flops, step.stats.tokens) == (0, 0)
        assert weight_bytes(learner.weights()) == at_start
    step = next(loop)
    assert len(step.batch) > 0
    assert math.isfinite(step.stats.loss)
    assert weight_bytes(learner.weights()) != at_start


def test_the_loop_ends_when_the_pool_has_run_dry(run, recipe):
    # Six prompts, four tickets (k = 1): the first six groups are the first pass. Prompts 5 and 6 are still in
    # flight when 1 to 4 have retired, so a second pass draws them once more. That makes 8 groups, 4 steps.
    recipe = replace(
        recipe, schedule=PipelineRL(k=1), task=Chain(k_max=1, heldout_per_length=4, train_per_length=6)
    )
    steps, generator, learner = run(recipe, 99, verify=lambda rollout: Reward(1.0, True))
    assert len(steps) == 4
    assert learner.version == 4
    assert [draw for _, draw in generator.submitted] == [0] * 6 + [1] * 2
    assert {name for name, _ in generator.submitted[4:6]} == {name for name, _ in generator.submitted[6:]}


def test_prompts_that_the_trainer_has_seen_retire(run, recipe):
    kept = NoPositiveResampling(threshold=0.9)
    recipe = replace(recipe, curriculum=kept, task=Chain(k_max=2, heldout_per_length=4, train_per_length=8))

    def odd_prompts_are_easy(rollout):
        right = bool(int(rollout.prompt.id.rpartition("/")[2]) % 2)
        return Reward(1.0 if right else -1.0, right)

    _, generator, _ = run(recipe, 40, verify=odd_prompts_are_easy)
    late = generator.submitted[40:]
    assert len(late) > 20
    assert all(int(name.rpartition("/")[2]) % 2 == 0 for name, _ in late)


def test_a_run_is_a_function_of_its_seed_bit_for_bit(run, recipe):
    def fingerprint(seed):
        steps, _, learner = run(recipe, 4, seed=seed)
        tokens = [r.token_T.tolist() for step in steps for group in step.groups for r in group.rollouts]
        return weight_bytes(learner.weights()), tokens, [step.stats.loss for step in steps]

    first = fingerprint(0)
    assert fingerprint(0) == first
    assert fingerprint(1)[0] != first[0]
    assert fingerprint(1)[1] != first[1]


def test_thirty_steps_raise_the_reward(run, recipe):
    def likes_digits(rollout):
        good = bool(rollout.token_T[0] >= 9)
        return Reward(1.0 if good else -1.0, good)

    easy = replace(
        recipe,
        curriculum=NoPositiveResampling(threshold=1.0),
        batch=BatchSize(prompts=P, samples=16, micro=32),
        schedule=PipelineRL(k=2),
    )
    steps, _, _ = run(easy, 30, verify=likes_digits)
    correct = [np.mean([group.correct_G.mean() for group in step.groups]) for step in steps]
    assert np.mean(correct[-5:]) > np.mean(correct[:5]) + 0.2
