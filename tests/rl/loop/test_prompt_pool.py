import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from scalerl.rl.algo.curriculum import History, NoPositiveResampling, Uniform
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.types import Group, Prompt

PROMPTS = [Prompt(f"p/1/{i}", str(i), "0") for i in range(6)]


def pool_of(seed=0, threshold=0.9, prompts=PROMPTS, history: Any = "latest"):
    return PromptPool(prompts, NoPositiveResampling(threshold, history), seed)


@pytest.fixture
def verified(make_rollout):
    """Makes a verified group: the first `correct` of `n` are right, the last `cut` truncated."""

    def make(prompt_id, correct, n, cut=0):
        rollouts = tuple(make_rollout(prompt=prompt_id, truncated=i >= n - cut) for i in range(n))
        right_G = np.arange(n) < correct
        return Group(rollouts, np.where(right_G, 1.0, -1.0), right_G)

    return make


def draw_pass(pool, n=6):
    return [drawn for _ in range(n) if (drawn := pool.draw()) is not None]


def test_a_pass_draws_every_prompt_once_and_counts_the_draws():
    pool = pool_of()
    for number in range(3):
        drawn = draw_pass(pool)
        assert sorted(prompt.id for prompt, _ in drawn) == [p.id for p in PROMPTS]
        assert [draw for _, draw in drawn] == [number] * 6


def test_the_order_is_shuffled_by_the_seed_and_the_pass():
    def orders(seed):
        pool = pool_of(seed)
        return [tuple(prompt.id for prompt, _ in draw_pass(pool)) for _ in range(3)]

    assert orders(5) == orders(5)
    assert len({*orders(5), *orders(6)}) == 6


def test_a_prompt_that_is_nearly_always_right_is_never_drawn_again(verified):
    pool = pool_of()
    draw_pass(pool)
    pool.record(verified("p/1/0", 9, 10))  # 0.9 reaches the threshold
    pool.record(verified("p/1/1", 10, 10))
    pool.record(verified("p/1/2", 8, 10))
    assert pool.left == 4
    drawn = [prompt.id for prompt, _ in draw_pass(pool, 12)]
    assert sorted(drawn) == sorted([f"p/1/{i}" for i in (2, 3, 4, 5)] * 3)


def test_a_prompt_retired_in_the_middle_of_a_pass_is_not_drawn_in_what_is_left_of_it(verified):
    pool = pool_of()
    first = [prompt.id for prompt, _ in draw_pass(pool, 2)]
    pending = next(p.id for p in PROMPTS if p.id not in first)
    pool.record(verified(pending, 4, 4))
    assert pending not in [prompt.id for prompt, _ in draw_pass(pool, 20)]


def test_the_whole_history_counts_with_truncated_completions_as_failures(verified):
    pool = pool_of(history="all")
    pool.record(verified("p/1/0", 6, 10))
    pool.record(verified("p/1/0", 10, 10))  # 16 of 20 = 0.8, though the last draw was perfect
    assert pool.left == 6
    pool.record(verified("p/1/0", 10, 10))  # 26 of 30 = 0.867
    assert pool.left == 6
    pool.record(verified("p/1/0", 10, 10))  # 36 of 40 = 0.9
    assert pool.left == 5
    pool.record(verified("p/1/1", 8, 10, cut=2))  # all that ended are right, 8 of 10 in all
    assert pool.left == 5


def test_a_dry_pool_draws_nothing(verified):
    pool = pool_of()
    for prompt in PROMPTS:
        pool.record(verified(prompt.id, 4, 4))
    assert pool.left == 0
    assert pool.draw() is None
    assert pool.draw() is None


def test_the_threshold_is_met_exactly_at_whole_fractions():
    # 0.55 * 100 is 55.00000000000001 in floating point: 55 of 100 must be enough all the same.
    for percent in range(1, 101):
        rule = NoPositiveResampling(threshold=percent / 100, history="all")
        for hundreds in (1, 3, 7):
            assert rule.retires(History(percent * hundreds, 100 * hundreds))
            assert not rule.retires(History(percent * hundreds - 1, 100 * hundreds))
    assert not NoPositiveResampling().retires(History())


def test_a_prompt_that_is_learnt_late_retires_by_default_and_hardly_by_its_whole_history(verified):
    # An epoch at 40 %, then nothing but right answers: (0.4 + n) / (1 + n) reaches 0.9 at n = 5.
    epochs = {}
    for history in ("latest", "all"):
        pool = pool_of(history=history)
        pool.record(verified("p/1/0", 4, 10))
        epochs[history] = 0
        while pool.left == len(PROMPTS):
            pool.record(verified("p/1/0", 10, 10))
            epochs[history] += 1
    assert epochs == {"latest": 1, "all": 5}
    assert NoPositiveResampling().history == "latest"


def test_the_history_that_counts_is_all_of_it_or_the_latest_group(verified):
    rules = {name: NoPositiveResampling(history=name) for name in ("all", "latest")}
    pools = {name: PromptPool(PROMPTS, rule, 0) for name, rule in rules.items()}
    for pool in pools.values():
        pool.record(verified("p/0", 0, 4))
        pool.record(verified("p/0", 4, 4))  # 4 of 8 in all, 4 of 4 in the latest
    assert pools["all"].left == len(PROMPTS)
    assert pools["latest"].left == len(PROMPTS) - 1


def test_without_a_curriculum_prompts_come_in_every_pass(verified):
    pool = PromptPool(PROMPTS, Uniform(), 0)
    for prompt in PROMPTS:
        pool.record(verified(prompt.id, 4, 4))
    assert pool.left == len(PROMPTS)
    assert pool.draw() is not None


@pytest.mark.parametrize(
    "rule", [NoPositiveResampling(history="latest"), NoPositiveResampling(history="all")]
)
def test_a_resumed_pool_draws_what_the_first_one_would_have_drawn(verified, rule):
    """Retired prompts stay retired: in a new process, from a state that has been through JSON."""
    pool = PromptPool(PROMPTS, rule, 3)
    draw_pass(pool, 8)
    for number, correct in enumerate((4, 1, 4, 0)):
        pool.record(verified(f"p/1/{number}", correct, 4))
    resumed = PromptPool(PROMPTS, rule, 3)
    resumed.restore(json.loads(json.dumps(pool.state())))
    assert resumed.left == pool.left == 4
    for other in (pool, resumed):
        other.record(verified("p/1/1", 4, 4))  # its history goes on as well
    assert resumed.state() == pool.state()
    drawn = draw_pass(resumed, 30)
    assert drawn == draw_pass(pool, 30)
    assert not {"p/1/0", "p/1/2"} & {prompt.id for prompt, _ in drawn}


def names_of(pool, n):
    return [pool.draw()[0].id.partition("/")[0] for _ in range(n)]


def prompts_of(**counts):
    return [Prompt(f"{name}/{i}", "", "") for name, n in counts.items() for i in range(n)]


def test_tasks_are_drawn_by_weight_whatever_their_size_as_evenly_as_can_be():
    pool = PromptPool(prompts_of(math=1000, code=3), Uniform(), 0, {"math": 3.0, "code": 1.0})
    drawn = names_of(pool, 400)
    assert Counter(drawn) == {"math": 300, "code": 100}
    for first in range(0, 400, 40):  # in every batch
        assert 9 <= Counter(drawn[first : first + 40])["code"] <= 11
    assert pool._epochs["code/0"] in (33, 34)  # a pass over three prompts at a time


def test_a_task_that_is_retired_leaves_its_share_to_the_others(verified):
    pool = PromptPool(prompts_of(math=4, code=2), NoPositiveResampling(0.9), 0, {"math": 1.0, "code": 1.0})
    for i in range(2):
        pool.record(verified(f"code/{i}", 8, 8))
    assert pool.left == 4
    assert set(names_of(pool, 8)) == {"math"}


def test_a_pool_goes_on_where_it_was():
    def fresh():
        return PromptPool(prompts_of(math=7, code=3), Uniform(), 5, {"math": 2.0, "code": 1.0})

    one, other = fresh(), fresh()
    for _ in range(11):
        one.draw()
    other.restore(json.loads(json.dumps(one.state())))
    assert [one.draw() for _ in range(30)] == [other.draw() for _ in range(30)]
