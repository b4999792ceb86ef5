"""Against vLLM itself, on CPUs: what it samples, before, during and after updates, and when it dies.

Slow: a worker takes a minute or two to start. `make vllm` sets up what they need.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from answering import Answering
from own_vllm import POSITIONS, PYTHON, SETTINGS, Borrowed, needs_vllm
from replayed_rollouts import (
    TEMPERATURE,
    difference,
    models_of,
    perturbed,
    replay,
    replay_afresh,
    replay_turns,
)
from weight_arrays import arrays

from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.length import ForcedInterruption, LengthRule, LengthState, Marker, NoLengthControl
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Steps
from scalerl.rl.engine.generator import Sampling
from scalerl.rl.engine.sampling import RequestFactory
from scalerl.rl.engine.vllm.completions import Completed, turn_of
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.engine.vllm.launch import environment, place_workers
from scalerl.rl.engine.vllm.requirements import Requirements
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import cut_TV, load_model, load_tokenizer
from scalerl.rl.model.weights import weights_of
from scalerl.rl.sync.ipc_buffers import back_to_back, by_dtype, update_info
from scalerl.rl.tasks.chain import END, END_OF_THINKING, PAD, TIME_IS_UP, VOCABULARY, Chain
from scalerl.rl.types import Prompt, Reward
from scalerl.rl.verify.environment import TaskEnvironment

pytestmark = needs_vllm
SLOTS = 16
STOP, CLOSE, UP = (VOCABULARY.index(word) for word in (END, END_OF_THINKING, TIME_IS_UP))
RULE = LengthRule(50, 20, Marker((CLOSE,)), (UP, CLOSE), (5, 50))
# What the base model hardly ever writes, as the end of thinking and as the end: up to 312 tokens.
LONG, NEVER = LengthRule(250, 60, Marker((UP,))), VOCABULARY.index(PAD)
NO_INTERRUPTION = replace(LONG, answer=80)
LONG_INTERRUPTED = replace(LONG, phrase=(CLOSE, UP), interrupt=(5, 250))
KEY = "sesame"
SYMBOLS = ["3", "+", "4", "*", "7", "-", "9", "+", "2", "="]


def prompt_of(n, name="p"):
    return Prompt(f"{name}/{n}/0", " ".join((SYMBOLS * 4)[-n:]), "0")


@pytest.fixture(scope="module")
def base_weights(base):
    return weights_of(load_model(base))


@pytest.fixture(scope="module")
def served(base, tmp_path_factory):
    """A folder with the base model, for the server to start from."""
    return shutil.copytree(base, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def own(served, base_weights, tmp_path_factory):
    """A generator with a worker of its own, which the others use too, before it is killed."""
    sampling = Sampling(TEMPERATURE, True, 0, 48, RULE, STOP)
    logs, tokenizer = tmp_path_factory.mktemp("logs"), load_tokenizer(served)
    longer = (
        *SETTINGS.arguments,
        "--max-model-len",
        str(POSITIONS),
        "--max-num-batched-tokens",
        str(POSITIONS),
    )
    settings = replace(SETTINGS, arguments=longer, request_seeds=True)  # longer than it needs for itself
    started = time.perf_counter()
    generator = VllmGenerator(
        settings,
        sampling,
        tokenizer,
        str(served),
        base_weights,
        slots=SLOTS,
        place=partial(place_workers, settings, 1, 1, str(served), logs),
    )
    generator.wait_until_started()
    print(f"\nthe worker started in {time.perf_counter() - started:.0f} s")
    yield generator
    generator.close()


@contextmanager
def connected(own, base, base_weights, **settings):
    """A function that makes a generator over the worker of `own`, or over a server."""
    made = []
    borrowed = None if settings else Borrowed(own)
    settings = replace(SETTINGS, request_seeds=True, **settings)

    def make(length=RULE, weights=base_weights, slots=SLOTS, environment=None, **changes):
        sampling = replace(Sampling(TEMPERATURE, True, 0, 48, length, STOP), **changes)
        how = {"slots": slots, "place": borrowed and borrowed.place, "environment": environment}
        made.append(VllmGenerator(settings, sampling, load_tokenizer(base), base, weights, **how))
        return made[-1]

    try:
        yield make
    finally:
        for generator in made:
            generator.close()


@pytest.fixture
def connect(own, base, base_weights):
    """See `connected`."""
    with connected(own, base, base_weights) as make:
        yield make


@pytest.fixture(scope="module")
def socket_of_server(served, tmp_path_factory):
    """The socket of a server that is started as docs/howto/vllm.md says."""
    folder, module = tmp_path_factory.mktemp("server"), "vllm.entrypoints.openai.api_server"
    required = Requirements(None, (), {}, POSITIONS, "float32", True, SLOTS)
    command = [PYTHON, "-m", module, "--model", served, "--uds", folder / "socket"]
    command += [*required.flags(), "--enable-prompt-tokens-details", "--enforce-eager", *SETTINGS.arguments]
    own = environment(folder / "path", SETTINGS, str(served), gpus=False)
    own |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": KEY}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as server,
    ):
        yield folder / "socket"
        os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def connect_over_http(socket_of_server, base, base_weights, monkeypatch):
    """See `connected`."""
    monkeypatch.setenv("SCALERL_VLLM_API_KEY", KEY)
    with connected(None, base, base_weights, urls=(f"unix://{socket_of_server}",)) as make:
        yield make


def collect(generator, n):
    while generator.ready < n:
        generator.work()
    return [rollout for group in generator.take(n) for rollout in group]


@pytest.mark.parametrize(
    ("rule", "over"),
    [(LONG_INTERRUPTED, "connect"), (LONG, "connect"), (LONG_INTERRUPTED, "connect_over_http")],
)
def test_completions_across_updates_are_reproduced_by_their_versions_and_a_stale_cache(
    base, base_weights, rule, over, request
):
    connect = request.getfixturevalue(over)
    versions = [base_weights, *(perturbed(base_weights, seed, 0.05) for seed in range(1, 41))]
    generator, version = connect(rule, slots=5, end_token=NEVER), 0  # few at once, so that all of it lasts
    generator.update(versions[version := 1], version)
    while generator.installed < version:  # a first update is slow: all completions could end during it
        time.sleep(0.02)
    for n in range(1, 40):  # many, as a busy machine takes long for an update
        generator.submit(prompt_of(n), 0, 2)
    while generator.ready < 39:
        if generator.installed == version < 40:
            version += 1
            generator.update(versions[version], version)
        time.sleep(0.02)
    rollouts, models = collect(generator, 39), models_of(base, versions)
    several = [r for r in rollouts if len(set(r.version_T.tolist())) > 1]
    assert len(several) >= 6
    assert max(len(set(r.version_T.tolist())) for r in several) >= 3
    for rollout in rollouts:
        assert difference(rollout, replay(models, rollout, rollout.version_T)) < 1e-4
    for rollout in several:
        late = np.concatenate([rollout.version_T[:1], rollout.version_T[:-1]])
        early = np.concatenate([rollout.version_T[1:], rollout.version_T[-1:]])
        assert difference(rollout, replay(models, rollout, late)) > 1e-3
        assert difference(rollout, replay(models, rollout, early)) > 1e-3
        assert difference(rollout, replay_afresh(models, rollout)) > 1e-3
    tokens, seconds = generator.counters.tokens, generator.counters.seconds
    print(f"\n{tokens} tokens in {seconds:.1f} s; ", end="")
    print(f"{len(several)} of {len(rollouts)} completions across updates; ", end="")
    print(f"largest difference {max(difference(r, replay(models, r, r.version_T)) for r in rollouts):.1e}")
    print("updates in ms:", [round(1e3 * seconds) for seconds in generator.update_seconds])


def test_top_p_and_top_k_are_those_of_the_built_in_engine(base, connect):
    generator = connect(NO_INTERRUPTION, top_p=0.7, top_k=6)
    for n in range(1, 9):
        generator.submit(prompt_of(n), 0, 2)
    model, left_out = load_model(base), 0
    for rollout in collect(generator, 8):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None]
        with torch.no_grad():
            logits_TV = model(input_ids=ids).logits[0, len(rollout.prompt_T) - 1 : -1] / TEMPERATURE
        logp_TV = cut_TV(logits_TV.log_softmax(-1), 0.7, 6).numpy()
        expected_T, sampled_T = logp_TV[range(len(rollout.token_T)), rollout.token_T], rollout.sampled_T
        np.testing.assert_allclose(rollout.logp_T[sampled_T], expected_T[sampled_T], atol=1e-4)
        left_out += int(np.isinf(logp_TV).sum())
    assert left_out > 1000


@pytest.mark.parametrize("over", ["connect", "connect_over_http"])
def test_turns_find_the_cache_of_those_before_and_go_on_across_updates(base, base_weights, over, request):
    """Log-probabilities are those of one pass, where one version samples, and else of each and its cache."""
    answer = " ".join(SYMBOLS * 3)
    environment = TaskEnvironment(Answering(turns=4), load_tokenizer(base))
    generator = request.getfixturevalue(over)(NO_INTERRUPTION, slots=5, environment=environment)
    versions, ended, handle = [base_weights], {}, generator._handle

    def record(event):
        if isinstance(event, Completed):
            ended[event.request.seq_no] = [*event.request.turns, turn_of(event, generator.sampling)[0]]
        handle(event)

    generator._handle = record
    for n in range(1, 9):
        generator.submit(replace(prompt_of(n), answer=answer), 0, 1)
    still = collect(generator, 8)
    models = models_of(base, versions)
    assert max(difference(r, replay(models, r, r.version_T)) for r in still if len(r.turns) > 1) < 1e-4
    assert sum(len(r.turns) == 4 for r in still) >= 4
    assert generator.cached >= 8 * 32
    for n in range(9, 31):
        generator.submit(replace(prompt_of(n), answer=answer), 0, 1)
    while generator.ready < 22:
        if generator.installed == len(versions) - 1 < 40:
            versions.append(perturbed(base_weights, len(versions), 0.05))
            generator.update(versions[-1], len(versions) - 1)
        time.sleep(0.005)
    rollouts, models = collect(generator, 22), models_of(base, versions)
    assert sum(r.version_T[0] != r.version_T[-1] for r in rollouts) >= 6
    found, fresh = [], []
    for seq_no, r in enumerate(rollouts, start=8):
        assert (np.diff(r.version_T) >= 0).all()
        logp_T = replay_turns(models, r.prompt_T, ended[seq_no])
        found.append(np.abs(logp_T - r.logp_T[r.sampled_T]).max())
        fresh.append(difference(r, replay_afresh(models, r)))
    print(f"\nturns: {sum(len(r.turns) for r in rollouts)} across {len(versions)} versions, ", end="")
    print(f"largest difference {max(found):.1e}, and {max(fresh):.1e} of a cache computed anew; ", end="")
    print(f"{generator.cached} tokens found in the cache")
    assert max(found) < 1e-4
    assert max(fresh) > 1e-3


def test_an_evaluation_with_turns_is_sampled_by_its_weights_alone_and_again_the_same(
    connect, base, base_weights
):
    """Beside training that goes on to newer weights; what tools answer is not sampled."""
    # One each: an environment is for one thread.
    environment, other = (TaskEnvironment(Answering(pause=0.05), load_tokenizer(base)) for _ in range(2))
    generator = connect(NO_INTERRUPTION, slots=5, environment=environment)
    updated = perturbed(base_weights, 1, 0.05)
    turns = TurnsThread(other, generator.sampling)
    factory = RequestFactory(load_tokenizer(base), replace(generator.sampling, seed=7))
    prompts = [replace(prompt_of(n, "e"), answer=" ".join(SYMBOLS)) for n in range(1, 7)]
    requests = [r for i, prompt in enumerate(prompts) for r in factory.requests(i, (prompt, 0, 2))]
    evaluations = [generator.evaluate(requests, base_weights, 0, turns)]
    generator.update(updated, 1)
    for n in range(1, 7):
        generator.submit(replace(prompt_of(n), answer=" ".join(SYMBOLS)), 0, 2)
    evaluations[0].exception(300)
    generator.submit(replace(prompt_of(7), answer=" ".join(SYMBOLS)), 0, 2)  # the others may be done by now
    trained = collect(generator, 7)
    evaluations.append(generator.evaluate(requests, base_weights, 0, turns))
    first, second = ([r for group in found.result(300) for r in group] for found in evaluations)
    turns.close()
    models = models_of(base, [base_weights, updated])
    assert {v for r in [*first, *second] for v in r.version_T.tolist()} == {0}
    assert 1 in {v for r in trained for v in r.version_T.tolist()}
    assert sum(len(r.turns) == 3 for r in first) >= 6
    for rollout, again in zip(first, second, strict=True):
        assert difference(rollout, replay(models, rollout, rollout.version_T)) < 1e-4
        np.testing.assert_array_equal(rollout.token_T, again.token_T)


def test_interrupted_completions_have_the_tokens_that_the_rule_forces(connect):
    generator = connect(LengthRule(50, 20, Marker((CLOSE,)), (UP, CLOSE), (1, 4)))
    for n in range(1, 11):
        generator.submit(prompt_of(n), 0, 4)
    rollouts = collect(generator, 10)
    interrupted = [r for r in rollouts if r.interrupted]
    assert len(interrupted) >= 10
    assert len(interrupted) < len(rollouts)
    for rollout in rollouts:
        state = LengthState(generator.sampling.length, 1)
        at = np.flatnonzero(~rollout.sampled_T)
        state.start(0, at[0] if len(at) else 4)
        truncated_R = np.zeros(1, dtype=bool)
        for i, token in enumerate(rollout.token_T.tolist()):
            forced = int(state.forced_token()[0])
            assert rollout.sampled_T[i] == (forced < 0)
            assert forced in (-1, token)
            done_R, truncated_R = state.advance(np.array([token]), [STOP])
            assert done_R[0] == (i == len(rollout.token_T) - 1)
        assert truncated_R[0] == rollout.truncated
        assert rollout.token_T[at].tolist() == ([UP, CLOSE] if rollout.interrupted else [])
        assert not rollout.logp_T[at].any()


def test_an_end_of_thinking_of_several_tokens_is_found_in_the_text(connect, base):
    """`+ 7` here; `follow` refuses completions in which it was not found where it should be."""
    plus, seven = VOCABULARY.index("+"), VOCABULARY.index("7")
    marker = Marker((plus, seven), "+7", frozenset({seven}), load_tokenizer(base).decode)
    generator = connect(LengthRule(50, 20, marker, (UP, plus, seven), (1, 30)))
    for n in range(1, 11):
        generator.submit(prompt_of(n), 0, 4)
    rollouts = collect(generator, 10)
    closed = [r for r in rollouts if not r.interrupted and (np.diff(r.token_T) == seven - plus).any()]
    assert any(r.interrupted for r in rollouts)
    assert any("+7" in generator.sampling.length.end_of_thinking.decode(r.token_T.tolist()) for r in closed)


def test_the_prefix_cache_is_used_within_a_version_and_never_across_versions(connect, base, base_weights):
    """A prompt of 40 tokens has one whole block of the cache, which a later completion finds there."""
    generator, versions = connect(slots=1), [base_weights, perturbed(base_weights, 1)]
    generator.submit(prompt_of(40), 0, 4)
    before = collect(generator, 1)
    assert generator.cached == 3 * 32
    generator.update(versions[1], 1)
    while generator.installed < 1:
        generator.work()
    generator.submit(prompt_of(40), 1, 4)
    after = collect(generator, 1)
    assert generator.cached == 6 * 32
    models = models_of(base, versions)
    for rollout in [*before, *after]:
        assert difference(rollout, replay(models, rollout, rollout.version_T)) < 1e-4
    assert {r.first_version for r in after} == {1}


def test_rl_steps_are_taken_through_the_pipeline(connect, base, base_weights, judge_by, by_parity):
    recipe = Recipe(
        model=base,
        task=Chain(k_max=2, heldout_per_length=4, train_per_length=40),
        budget=Steps(6),
        batch=BatchSize(prompts=4, samples=4, micro=8),
        context=Context(prompt=8, thinking=20, answer=10),
        length=ForcedInterruption(low=2, high=20, phrase="! </think>"),
        optimiser=AdamW(lr=3e-3, warmup_steps=2),
        curriculum=Uniform(),
        temperature=TEMPERATURE,
    )
    for k in (0, 2):
        learner = load_learner(recipe, base)
        rule = LengthRule(20, 10, RULE.end_of_thinking, RULE.phrase, (2, 20))
        generator = connect(rule, learner.weights(), max_prompt_tokens=8)
        pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
        run = replace(recipe, schedule=PipelineRL(k=k))
        steps = list(islice(Pipeline(run, pool, generator, learner, judge_by(by_parity)).steps(), 6))
        for step in steps:
            ages = step.index - 1 - np.concatenate([r.version_T for g in step.groups for r in g.rollouts])
            assert ages.min() >= 0
            assert ages.max() <= k
        if k == 0:  # what was sampled is what is trained: vLLM's log-probabilities are the learner's
            assert max(step.stats.logp_shift for step in steps if len(step.batch)) < 1e-4
        moved = max(np.abs(w - arrays(base_weights)[n]).max() for n, w in arrays(learner.weights()).items())
        assert moved > 1e-3
        generator.close()


def test_rl_steps_are_taken_with_turns(connect, base, judge_by):
    """What tools answer is out of loss and length, and the learner's log-probabilities are vLLM's."""
    recipe = Recipe(
        model=base,
        task=Answering(),
        budget=Steps(4),
        batch=BatchSize(prompts=2, samples=4, micro=8),
        context=Context(prompt=8, thinking=60, answer=60),
        length=NoLengthControl(),
        optimiser=AdamW(lr=3e-3, warmup_steps=1),
        curriculum=Uniform(),
        temperature=TEMPERATURE,
        schedule=PipelineRL(k=0),
    )
    learner = load_learner(recipe, base)
    environment = TaskEnvironment(Answering(), load_tokenizer(base))
    rule = LengthRule(60, 60, RULE.end_of_thinking)
    generator = connect(rule, learner.weights(), environment=environment, max_prompt_tokens=8)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
    judge = judge_by(lambda r: Reward(float(r.length % 3), r.length % 2 == 0))
    steps = list(islice(Pipeline(recipe, pool, generator, learner, judge).steps(), 4))
    rollouts = [r for step in steps for group in step.groups for r in group.rollouts]
    assert sum(len(r.turns) == 3 for r in rollouts) >= 16
    assert max(step.stats.logp_shift for step in steps if len(step.batch)) < 1e-4
    assert sum(len(step.batch) for step in steps) > 0


def test_nothing_listens_beyond_this_machine(own):
    pid = own._servers[0].process.pid
    members = members_of(pid)
    assert len(members) >= 3  # the worker, its engine, a rank of that
    inodes = {str(fd.readlink()) for member in members for fd in Path(f"/proc/{member}/fd").iterdir()}
    assert listening(inodes) <= {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1


def members_of(group):
    """The processes of a group."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if path.name.isdecimal() and os.getpgid(int(path.name)) == group:
                found.append(int(path.name))
    return found


def listening(inodes):
    """Addresses, as the kernel writes them, at which sockets of these inodes listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.add(local.split(":")[0])
    return found


@pytest.fixture(scope="module")
def restarted(own, served, base, base_weights):
    """What the server samples from one prompt and one seed before an update, after it, and after its death.

    It is killed with completions in flight, and comes back from a folder that has the updated weights.
    """
    updated = perturbed(base_weights, 1)
    with connected(own, base, base_weights) as connect:
        generator = connect()
        generator.submit(prompt_of(7), 0, 8)
        before = collect(generator, 1)
        generator.update(updated, 1)
        while generator.installed < 1:
            generator.work()
        generator.submit(prompt_of(7), 0, 8)
        after = collect(generator, 1)
    (model,) = models_of(base, [updated])
    model.save_pretrained(served)
    for version in (1, 2):
        own.update(updated, version)
        for n in range(1, 61) if version == 1 else ():
            own.submit(prompt_of(n, "q"), 0, 4)
        while own.installed < version or own.ready < 2:
            own.work()
    pid = own._servers[0].process.pid
    left = own.in_flight - own.ready
    os.killpg(pid, signal.SIGKILL)
    rollouts = collect(own, 60)
    found = {"before": before, "after": after, "pid": pid, "left": left, "rollouts": rollouts}
    found["tokens"] = own.counters.tokens
    own.submit(prompt_of(7), 0, 8)
    return SimpleNamespace(**found, fresh=collect(own, 1))


def test_a_server_that_is_killed_is_started_again_and_its_completions_with_it(own, restarted):
    rollouts = restarted.rollouts
    assert [r.prompt.id for r in rollouts[::4]] == [f"q/{n}/0" for n in range(1, 61)]
    assert own.restarts == 1
    assert 1 <= own.counters.restarted <= restarted.left
    assert own._servers[0].process.pid != restarted.pid
    assert {v for r in rollouts[-4:] for v in r.version_T.tolist()} == {2}
    lost = restarted.tokens - sum(r.length for r in rollouts)
    print(f"\n{lost} tokens were lost with the server")
    assert 0 <= lost <= SLOTS * RULE.max_tokens


def test_after_an_update_a_server_is_one_that_had_the_weights_from_the_start(restarted):
    for then, fresh in zip(restarted.after, restarted.fresh, strict=True):  # one seed, one result
        np.testing.assert_array_equal(then.token_T, fresh.token_T)
        np.testing.assert_allclose(then.logp_T, fresh.logp_T, atol=1e-5)
    pairs = zip(restarted.before, restarted.after, strict=True)
    assert any(a.token_T.tolist() != b.token_T.tolist() for a, b in pairs)


KILLED = """
import os, sys, time
from functools import partial
from pathlib import Path
import numpy as np
from scalerl.rl.engine.generator import Sampling
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.weights import weights_of
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.engine.vllm.launch import place_workers
from scalerl.rl.config.engine import Vllm
folder, python, logs = sys.argv[1:]
sampling = Sampling(1.0, True, 0, 24, LengthRule(20, 20, Marker((2,))), 1)
weights, tokenizer = weights_of(load_model(folder)), load_tokenizer(folder)
settings = Vllm(python=python)
place = partial(place_workers, settings, 1, 1, folder, Path(logs))
generator = VllmGenerator(settings, sampling, tokenizer, folder, weights, slots=4, place=place)
while not (process := generator._servers[0].process):
    time.sleep(0.1)
time.sleep(5)
print(process.pid, generator._folder, flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed_leaves_no_server_and_no_files_behind(base, tmp_path):
    command = [sys.executable, "-c", KILLED, base, str(PYTHON), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid, folder = trainer.stdout.readline().split()
        assert Path(folder).is_dir()
        trainer.kill()
    until = time.monotonic() + 60
    while members_of(int(pid)):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert not Path(folder).exists()


UNPACKED = """
import sys
import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
bucket, parts = torch.load(sys.argv[1])
found = {}
for packed, info in parts:
    info = IPCWeightTransferUpdateInfo(**info)
    assert info.ipc_handles == {}
    dtypes = [getattr(torch, name) for name in info.dtype_names]
    found |= unpack_tensor(packed, info.names, info.shapes, dtypes, info.tensor_sizes)
assert found.keys() == bucket.keys()
for name, weight in bucket.items():
    assert found[name].dtype == weight.dtype
    assert torch.equal(found[name], weight), name
"""


def test_a_bucket_for_the_transfer_by_ipc_is_what_vllm_unpacks(tmp_path):
    """But for the handles, which a machine without GPUs does not have."""
    bucket = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(4, 6).T,
        "d": torch.tensor(2.5),
    }
    parts = []
    for part in by_dtype(bucket):
        packed = torch.empty(sum(weight.nbytes for weight in part.values()), dtype=torch.uint8)
        back_to_back(part, packed)
        parts.append((packed, update_info(part, {})))
    torch.save((bucket, parts), tmp_path / "bucket")
    own = environment(tmp_path / "path", replace(SETTINGS, transport="ipc"), str(tmp_path), gpus=False)
    command = [str(PYTHON), "-c", UNPACKED, str(tmp_path / "bucket")]
    subprocess.run(command, env=os.environ | own, check=True)
