import numpy as np
import pytest

from scalerl.rl.algo.advantage import BatchStd, LeaveOneOut, NoStd, PromptStd, centre, has_signal
from scalerl.rl.algo.averaging import ConstantAverage, PromptAverage, SampleAverage, TokenAverage
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.types import Group


def group(rollouts, rewards):
    reward_G = np.array(rewards, dtype=float)
    return Group(tuple(rollouts), reward_G, reward_G > 0)


def build(groups, keep=False):
    return make_batch(groups, BatchStd(), PromptAverage(), 100, keep_zero_variance=keep)


def test_prompt_average_by_hand():
    # Group 7: 2 + 6 = 8 tokens, 1 / (2 groups * 8) each. Group 3: 4 tokens, 1 / (2 * 4) each.
    weight_N = PromptAverage()(np.array([2.0, 4.0, 6.0]), np.array([7, 3, 7]), 100)
    np.testing.assert_allclose(weight_N, [1 / 16, 1 / 8, 1 / 16], rtol=1e-15)


def test_batch_std_by_hand(make_rollout):
    # Group 1: rewards 1 1 -1 -1, mean 0, A = 1 1 -1 -1. Group 2: rewards 1 -1 -1 -1, mean -1/2,
    # A = 3/2 -1/2 -1/2 -1/2. Mean square = (4 + 9/4 + 3/4) / 8 = 7/8; the mean is 0.
    groups = [group([make_rollout()] * 4, [1, 1, -1, -1]), group([make_rollout()] * 4, [1, -1, -1, -1])]
    std = np.sqrt(7 / 8)
    expected = np.array([1, 1, -1, -1, 1.5, -0.5, -0.5, -0.5]) / std
    np.testing.assert_allclose(build(groups).advantage_N, expected, rtol=1e-14)


def test_truncated_completions_leave_before_the_mean_and_flat_groups_before_the_std(make_rollout):
    whole, cut = make_rollout(), make_rollout(truncated=True)
    # Group 1 loses a truncated failure: 1 1 -1 are left, mean 1/3, A = 2/3 2/3 -4/3.
    # Group 2 is flat; group 3 is flat once its only failure, a truncated one, has left.
    # Std over the three that enter: sqrt((4 + 4 + 16) / 9 / 3) = sqrt(8/9).
    groups = [
        group([whole, cut, whole, whole], [1, -1, 1, -1]),
        group([whole] * 4, [-1, -1, -1, -1]),
        group([whole, whole, whole, cut], [1, 1, 1, -1]),
    ]
    batch = build(groups)
    np.testing.assert_allclose(batch.advantage_N, np.array([2, 2, -4]) / 3 / np.sqrt(8 / 9), rtol=1e-14)
    assert (batch.groups_used, batch.zero_variance) == (1, 2)
    # Kept, a flat group has A = 0, enters the std (8/3 over 10 completions), and takes its share of weight.
    kept = build(groups, keep=True)
    np.testing.assert_allclose(
        kept.advantage_N, np.array([2, 2, -4, *[0] * 7]) / 3 / np.sqrt(8 / 3 / 10), rtol=1e-14
    )
    assert (kept.groups_used, kept.zero_variance) == (3, 2)
    np.testing.assert_allclose(kept.weight_NT.sum(1)[:3].sum(), 1 / 3, rtol=1e-14)


def test_rewards_that_differ_by_little_are_still_a_signal(make_rollout):
    # 0.1 + 0.2 - 0.3 style rewards: an exact comparison, no tolerance on the std.
    assert build([group([make_rollout()] * 3, [0.1, 0.1, 0.1])]).groups_used == 0
    assert build([group([make_rollout()] * 2, [1.0, 1.0 + 2**-40])]).groups_used == 1


def test_one_completion_left_of_a_group_has_no_baseline(make_rollout):
    batch = build([group([make_rollout(), make_rollout(truncated=True)], [1, -1])])
    assert len(batch) == 0
    assert batch.weight_NT.shape == (0, 0)


def test_inserted_tokens_have_no_weight_and_count_in_no_length(make_rollout):
    # Completion 1: 6 tokens of which 2 are inserted; completion 2: 4. So 8 tokens weigh 1/8 each.
    batch = build([group([make_rollout(6, inserted=(2, 3)), make_rollout(4)], [1, -1])])
    expected = np.zeros((2, 10))
    expected[0, [4, 5, 8, 9]] = 1 / 8
    expected[1, 4:8] = 1 / 8
    np.testing.assert_allclose(batch.weight_NT, expected, rtol=1e-15)
    assert batch.length_N.tolist() == [10, 8]  # positions, not tokens that count


def test_tokens_logps_and_versions_stand_where_the_weights_do(make_rollout):
    logp_T = np.array([-0.5, -1.5], dtype=np.float32)
    first = make_rollout(2, prompt_T=(9, 5), token_T=(2, 12), logp_T=logp_T, version=4)
    second = make_rollout(1, prompt_T=(9, 6, 10, 5), token_T=(1,), version=5)
    batch = build([group([first, second], [1, -1])])
    assert batch.token_NT.tolist() == [[9, 5, 2, 12, 0], [9, 6, 10, 5, 1]]
    assert batch.behaviour_logp_NT.tolist() == [[0, 0, -0.5, -1.5, 0], [0, 0, 0, 0, -1]]
    assert batch.version_NT[batch.sampled_NT].tolist() == [4, 4, 5]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keep", [False, True])
def test_weights_sum_to_one_and_advantages_have_mean_0_and_std_1(make_rollout, seed, keep):
    rng = np.random.default_rng(seed)

    def member():
        length = int(rng.integers(2, 30))
        inserted = tuple(rng.choice(length, size=int(rng.integers(0, length)), replace=False))
        return make_rollout(length, inserted=inserted, truncated=bool(rng.random() < 0.2))

    groups = [group([member() for _ in range(5)], rng.choice([-1, 1], 5)) for _ in range(6)]
    batch = build(groups, keep)
    assert len(batch) > 0
    assert batch.weight_NT.sum() == pytest.approx(1, abs=1e-12)
    assert batch.advantage_N.mean() == pytest.approx(0, abs=1e-12)
    assert batch.advantage_N.std() == pytest.approx(1, abs=1e-12)


def test_the_other_averages_by_hand():
    length_N, group_N = np.array([2.0, 4.0, 6.0]), np.array([7, 3, 7])
    for average, expected in [
        (SampleAverage(), [1 / 6, 1 / 12, 1 / 18]),  # a third for each completion
        (TokenAverage(), [1 / 12] * 3),  # of 12 tokens
        (ConstantAverage(), [1 / 30] * 3),  # of 3 completions with a budget of 10 each
        (ConstantAverage(length=5), [1 / 15] * 3),
    ]:
        np.testing.assert_allclose(average(length_N, group_N, 10), expected, rtol=1e-15)
    assert (SampleAverage()(length_N, group_N, 10) * length_N).sum() == pytest.approx(1)


def test_the_other_advantages_by_hand():
    # Rewards 1 1 -1 -1 and 1 -1 -1 -1, centred: 1 1 -1 -1 and 3/2 -1/2 -1/2 -1/2.
    centred = [centre(np.array(r, dtype=float)) for r in ([1, 1, -1, -1], [1, -1, -1, -1])]
    second = np.array([1.5, -0.5, -0.5, -0.5])
    for advantage, first, scale in [
        (PromptStd(), 1.0, 1 / np.sqrt(0.75)),  # mean squares 1 and (9/4 + 3/4) / 4
        (NoStd(), 1.0, 1.0),
        (LeaveOneOut(), 4 / 3, 4 / 3),  # r - mean of the three others: 1 - (-1/3)
    ]:
        found = advantage(centred)
        np.testing.assert_allclose(found[0], first * np.array([1, 1, -1, -1]), rtol=1e-14)
        np.testing.assert_allclose(found[1], scale * second, rtol=1e-14)


@pytest.mark.parametrize("advantage", [BatchStd(), PromptStd(), NoStd(), LeaveOneOut()])
def test_equal_rewards_have_no_advantage_to_the_last_digit(advantage):
    # The mean of three times .1 is not .1, and a std of rounding errors would blow them up to 1.
    for rewards in ([0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [1e-9] * 5, [0.0] * 2):
        reward_G = np.array(rewards)
        assert not has_signal(reward_G)
        assert not np.concatenate(advantage([centre(reward_G)])).any()


def test_truncated_completions_may_stay(make_rollout):
    groups = [group([make_rollout(), make_rollout(truncated=True)], [1, -1])]
    batch = make_batch(groups, BatchStd(), PromptAverage(), 100, keep_truncated=True)
    np.testing.assert_allclose(batch.advantage_N, [1, -1])
