"""Completions of several turns: what an environment answers is read, not sampled, and the cache goes on."""

import logging
import re

import numpy as np
import pytest
import torch
from answering import Answering
from small_runs import learner_recipe

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.engine import EngineKind
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.engine.generator import ANSWER_DELAY_STEPS, TorchGenerator
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.weights import weights_of
from scalerl.rl.tasks.chain import END, VOCABULARY
from scalerl.rl.types import Group, Limits, Prompt, Reward
from scalerl.rl.verify.environment import TaskEnvironment

EOS = VOCABULARY.index(END)


@pytest.fixture(scope="module")
def environment(llama_folder):
    made = TaskEnvironment(Answering(), load_tokenizer(llama_folder))
    yield made
    made.close()


def make(folder, environment, rows=4, budget=60, engine: EngineKind = "auto"):
    """A generator of completions of at most so many tokens, without length control."""
    rule = LengthRule(budget - 1, 1, Marker((VOCABULARY.index("</think>"),)))
    sampling = Sampling(1.0, True, 0, 24, rule, EOS, engine)
    return TorchGenerator(load_model(folder), load_tokenizer(folder), sampling, rows, environment=environment)


def prompts_of(*answers):
    return [Prompt(f"p/{i}", "3 + 4 =" + " -" * i, answer) for i, answer in enumerate(answers)]


def collect(generator, prompts, samples=4):
    for prompt in prompts:
        generator.submit(prompt, 0, samples)
    return [rollout for group in generator.collect(len(prompts)) for rollout in group]


@pytest.mark.parametrize("engine", ["kernels", "transformers"])
def test_log_probabilities_are_those_of_one_pass_over_the_whole_trajectory(llama_folder, environment, engine):
    """Prompt, turns and answers in one forward pass: what the cache holds behind an answer is right."""
    generator = make(llama_folder, environment, engine=engine)
    rollouts = collect(generator, prompts_of("1 + 2", "7", "9 9 9 9 9 9 9 9 9 9 9 9", "- 5"))
    assert max(len(rollout.turns) for rollout in rollouts) == 3
    assert sum(len(rollout.turns) > 1 for rollout in rollouts) >= 8
    for r in rollouts:
        token_T = torch.from_numpy(np.concatenate([r.prompt_T, r.token_T]))
        with torch.no_grad():
            logp_TV = torch.log_softmax(generator.model(token_T[None]).logits[0, :-1], -1)
        logp_T = logp_TV.gather(-1, token_T[1:, None])[:, 0].numpy()[len(r.prompt_T) - 1 :]
        assert np.abs(logp_T - r.logp_T)[r.sampled_T].max() < 1e-4
        assert not r.logp_T[~r.sampled_T].any()


def test_an_answer_follows_every_turn_but_the_last_and_is_not_sampled(llama_folder, environment):
    generator, tokenizer = make(llama_folder, environment), load_tokenizer(llama_folder)
    rollouts = collect(generator, prompts_of("1 + 2", "7"))
    for r in rollouts:
        edges = np.flatnonzero(np.diff(r.sampled_T)) + 1
        given = np.split(r.token_T, edges)[1::2]
        for number, token_T in enumerate(given, start=1):
            assert tokenizer.decode(token_T) == (r.prompt.answer + "=" * number).replace(" ", "")
        assert [turn_T[-1] == EOS for turn_T in r.turns[:-1]] == [True] * len(given)
        assert r.truncated == (r.token_T[-1] != EOS)
        assert not r.interrupted
        assert r.length == r.sampled_T.sum() == len(r.token_T) - sum(map(len, given))
        assert r.truncated or len(r.turns) == 3
    assert generator.counters.tokens == sum(r.length for r in rollouts)


def test_the_gradient_is_that_of_what_was_sampled(llama_folder, environment):
    """Against autograd over the sampled tokens alone: answers are read, and nothing of them is learnt."""
    generator = make(llama_folder, environment)
    for prompt in prompts_of("1 + 2", "7"):
        generator.submit(prompt, 0, 4)
    groups = [
        Group.of(rollouts, [Reward(float(r.length % 3), True) for r in rollouts])
        for rollouts in generator.collect(2)
    ]
    rollouts = [r for group in groups for r in group.rollouts]
    assert sum(not r.sampled_T.all() for r in rollouts) > 3
    batch = make_batch(groups, BatchStd(), PromptAverage(), 100, keep_zero_variance=True, keep_truncated=True)
    found, model = [], load_model(llama_folder)
    optimiser = AdamW(lr=1e-3, max_grad_norm=1e9)
    learner = Learner(load_model(llama_folder), learner_recipe(optimiser=optimiser))
    learner._optimiser.adamw.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in learner.model.parameters())
    )
    learner.step(batch)
    lengths = np.array([float(r.sampled_T.sum()) for r in rollouts])
    weight_N = PromptAverage()(lengths, np.repeat([0, 1], 4), 100)
    for r, weight, advantage in zip(rollouts, weight_N, batch.advantage_N, strict=True):
        token_T = torch.from_numpy(np.concatenate([r.prompt_T, r.token_T]))
        logp_TV = torch.log_softmax(model(token_T[None]).logits[0, :-1], -1)
        logp_T = logp_TV.gather(-1, token_T[1:, None])[len(r.prompt_T) - 1 :, 0]
        (-weight * advantage * logp_T[torch.from_numpy(r.sampled_T)].sum()).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_completion_does_not_depend_on_what_shares_its_batch(llama_folder, environment):
    prompts = prompts_of("1 + 2", "7", "- 5")
    together = collect(make(llama_folder, environment, rows=12), prompts)
    alone = [r for p in prompts for r in collect(make(llama_folder, environment, rows=1), [p])]
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.token_T, other.token_T)
        assert np.array_equal(one.sampled_T, other.sampled_T)


def test_answers_come_by_decode_steps_and_not_by_time(llama_folder, environment):
    """A slow environment changes nothing of what is decoded when; others decode until its answers are due."""

    def steps(environment):
        generator = make(llama_folder, environment, rows=6)
        for prompt in prompts_of("1 + 2", "7"):
            generator.submit(prompt, 0, 4)
        seen, waits = [], set()
        while generator.unfinished:
            asked_S = generator._slots.asked_S.copy()
            others = generator._slots.decoding_S.any() or bool(generator._waiting)
            ticks = generator.counters.ticks
            generator.tick()
            if others:
                waits |= {ticks - int(asked_S[i]) for i in np.flatnonzero(asked_S > generator._slots.asked_S)}
            seen.append((generator._slots.next_S.tolist(), generator._slots.asked_S.tolist()))
        return seen, waits

    slow = TaskEnvironment(Answering(pause=0.1), load_tokenizer(llama_folder))
    quick, later = steps(environment), steps(slow)
    slow.close()
    assert quick == later
    assert quick[1] == {ANSWER_DELAY_STEPS}


def test_a_generator_goes_on_from_its_state_with_turns_that_wait(llama_folder, environment):
    """Bit for bit, also where some slots wait for an answer and others are within one."""
    whole, first = make(llama_folder, environment), make(llama_folder, environment)
    prompts = prompts_of("1 + 2", "9 9 9 9 9 9", "- 5")
    expected = collect(whole, prompts)
    for prompt in prompts:
        first.submit(prompt, 0, 4)
    cuts = 0
    while not (first._slots.asked_S >= 0).any() or not (first._slots.next_S < first._slots.given_S).any():
        first.tick()
        cuts += 1
    second = make(llama_folder, environment)
    second.update(weights_of(load_model(llama_folder)), 0)
    second.restore(first.state())
    rollouts = [r for group in second.collect(3) for r in group]
    for one, other in zip(rollouts, expected, strict=True):
        for name in ("token_T", "sampled_T", "logp_T", "version_T"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert second.counters.ticks == whole.counters.ticks


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("sleeps", "timeout"),
        ("raises", r"raised\).*KeyError"),
        ("is a text", r"nonsense\).*not a list of texts"),
    ],
)
def test_an_environment_that_fails_costs_the_completion_alone(llama_folder, caplog, answer, reason):
    limits = Limits(seconds=1.0 if answer == "sleeps" else 60.0)
    environment = TaskEnvironment(Answering(limits=limits), load_tokenizer(llama_folder))
    with caplog.at_level(logging.WARNING, "scalerl"):
        rollouts = collect(make(llama_folder, environment), prompts_of(answer, "7"), samples=5)
    environment.close()
    failed, fine = rollouts[:5], rollouts[5:]
    ended = [r for r in failed if len(r.token_T) < 60]
    assert ended
    assert all(r.truncated and r.token_T[-1] == EOS and r.sampled_T.all() for r in ended)
    assert any(len(r.turns) > 1 for r in fine)
    (line,) = caplog.messages
    assert re.search(rf"an environment failed \({reason}", line)


def test_an_answer_that_does_not_fit_truncates_and_none_ends(llama_folder, environment):
    generator = make(llama_folder, environment, budget=30)
    long, ends = " ".join("9" * 28), "ends"
    rollouts = collect(generator, prompts_of(long, ends))
    for r in rollouts:
        assert len(r.turns) == 1
        assert r.truncated == (r.prompt.answer == long or r.token_T[-1] != EOS)
    assert any(r.prompt.answer == ends and not r.truncated for r in rollouts)
    assert any(r.prompt.answer == long and len(r.token_T) < 30 for r in rollouts)


def test_a_generator_in_a_process_of_its_own_waits_for_no_slow_environment(llama_folder):
    """`answers_at_once`: the others are complete before the answer of one that sleeps has failed."""
    environment = TaskEnvironment(Answering(limits=Limits(seconds=3.0)), load_tokenizer(llama_folder))
    generator = make(llama_folder, environment, rows=6)
    generator.answers_at_once = True
    for answer in ("sleeps", "ends"):
        generator.submit(prompts_of(answer)[0], 0, 3)
    complete, ticks = [], []
    while generator.unfinished:
        generator.work()
        complete += generator.take_complete()
        ticks.append(generator.counters.ticks)
    environment.close()
    assert complete == [1, 0]
    assert ticks.count(ticks[-1]) > 10  # the last of them waited, and the process could receive messages
