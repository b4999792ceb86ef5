"""Which metric stands for the pass rate: taken in silence, with a warning, or refused with the choices."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from scalerl.curve import fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.imported import as_run
from scalerl.ingest.load import run_of
from scalerl.ingest.logs.log import LogBuilder
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.shares import as_share, completions_of, n_samples
from scalerl.ingest.vocabularies import BY_TRAINER, VOCABULARIES
from scalerl.record.metric import is_named_for_correctness, kind_of

STEPS = np.arange(0, 400, 20)
RIGHT = 0.1 + 0.35 / (1 + (60 / np.maximum(STEPS, 1e-9)) ** 1.5)


def log(columns, config=None, steps=STEPS):
    builder = LogBuilder("log", "test", "run", lambda name: True)
    for n, step in enumerate(steps):
        builder.add(float(step), math.nan, {name: float(value[n]) for name, value in columns.items()})
    builder.config.update(config or {})
    return builder.build()


def trl(parts, weights=None):
    """An evaluation log of GRPOTrainer: means and spreads of reward functions, and their weighted sum.

    `parts` are pass rates by the name of a function, with what a right completion earns.
    """
    weights = weights or [1.0] * len(parts)
    columns = {}
    for name, (rate_N, earned) in parts.items():
        columns[f"eval_rewards/{name}/mean"] = earned * rate_N
        columns[f"eval_rewards/{name}/std"] = earned * np.sqrt(rate_N * (1 - rate_N))
    sums = [w * columns[f"eval_rewards/{name}/mean"] for w, name in zip(weights, parts, strict=True)]
    columns["eval_reward"] = np.sum(sums, axis=0)
    return log(columns | {"completions/mean_length": 100 + STEPS})


FORMAT = 0.3 + 0.65 / (1 + (20 / np.maximum(STEPS, 1e-9)) ** 2)


def metric_of(found, **asked):
    return run_of(found, ReadOptions(**asked)).metric


def test_a_number_of_right_answers_is_no_share():
    rates = {"eval/gsm8k/num_correct": 1319 * RIGHT, "eval/gsm8k/score": RIGHT}  # as tinker-cookbook has it
    run = run_of(log(rates | {"env/all/reward/total": RIGHT}), ReadOptions())
    assert run.config["source"]["trainer"] == "tinker-cookbook"
    assert (run.metric.name, run.metric.dataset) == ("eval/gsm8k/score", "gsm8k")


def test_a_held_out_reward_that_is_not_known_is_offered():
    found = log(
        {"critic/score/mean": RIGHT, "val/avg_reward": RIGHT}
    )  # as rLLM logs over verl, asynchronously
    with pytest.raises(InputError, match="name what is held out of val/avg_reward"):
        run_of(found, ReadOptions())


def test_successes_and_scores_of_training_are_not_held_out():
    found = log({"rewards": 2 * RIGHT, "successes": RIGHT})  # as torchtune logs
    with pytest.raises(InputError, match="no metric is held out: 'rewards' is a training reward"):
        run_of(found, ReadOptions())
    assert metric_of(found, metric="successes").split == "training"
    # TRL's experimental PPO, whose other names open-instruct has, too; and its online DPO.
    for beside in ("policy/clipfrac_avg", "rewards/margins"):
        scores = log({"objective/scores": RIGHT, "objective/rlhf_reward": RIGHT, beside: 0 * RIGHT})
        assert metric_of(scores, metric="objective/scores").split == "training"


def test_rewards_of_several_sets_in_rows_of_their_own_are_refused():
    builder = LogBuilder("log", "test", "run", lambda name: True)  # as TensorBoard has them: a row a value
    for step in range(0, 200, 20):
        for name, rate in (("math", 0.6), ("gsm8k", 0.3)):
            builder.add(step, math.nan, {f"eval/{name}_runtime": 9.0})
            builder.add(step, math.nan, {"eval/rewards/accuracy_reward/mean": rate + step / 1000})
            builder.add(step, math.nan, {f"eval/{name}_accuracy": rate})
    for named in (None, "eval/rewards/accuracy_reward/mean"):
        with pytest.raises(InputError, match="is logged for each of math, gsm8k, and nothing tells which"):
            run_of(builder.build(), ReadOptions(trainer="trl", metric=named))
    assert metric_of(builder.build(), trainer="trl", metric="eval/math_accuracy").name == "eval/math_accuracy"


@pytest.mark.parametrize("name", ["accuracy_reward", "correctness_reward_func", "is_correct", "exact_match"])
def test_the_part_that_is_named_for_correctness_is_the_pass_rate(name):
    run = run_of(trl({name: (RIGHT, 1.0), "format_reward": (FORMAT, 0.2)}), ReadOptions())
    metric = run.metric
    assert metric.name == f"eval_rewards/{name}/mean"
    assert (metric.kind, metric.others) == (
        "pass rate",
        ("eval_rewards/format_reward/mean", "eval_reward"),
    )
    assert not [text for text in run.warnings if "stands in" in text]
    found = fit(run, x="steps")
    assert found.ceiling == pytest.approx(0.45, abs=0.01)
    assert found.verdict(0.7, 5000) == "no-go"


def test_the_sum_of_rewards_is_never_taken_for_one_of_them():
    parts = {"reward_a": (RIGHT, 1.0), "reward_b": (FORMAT, 0.2)}
    with pytest.raises(
        InputError, match="several parts, and none of them is named for correctness"
    ) as caught:
        run_of(trl(parts), ReadOptions())
    for name in ("eval_rewards/reward_a/mean", "eval_rewards/reward_b/mean", "eval_reward", "--y NAME"):
        assert name in str(caught.value)
    assert metric_of(trl(parts), metric="eval_rewards/reward_a/mean").kind == "reward in [0, 1]"


def test_five_reward_functions():
    """The usual set of tutorials: one for right answers, four for the format."""
    parts = {
        name: (FORMAT, earned)
        for name, earned in [("int", 0.5), ("strict_format", 0.5), ("soft_format", 0.5)]
    }
    parts |= {"xmlcount": (FORMAT, 0.5), "correctness": (RIGHT, 1.0)}
    assert metric_of(trl(parts)).name == "eval_rewards/correctness/mean"


def test_a_right_answer_that_earns_2_is_told_by_the_spread_of_the_rewards():
    """Below .5 nothing in the means tells rewards of 0 and 2 from those of 0 and 1."""
    found = trl({"correctness_reward_func": (RIGHT, 2.0), "int_reward_func": (FORMAT, 0.5)})
    with pytest.raises(InputError, match=r"a right answer earns about 2; .*--max-reward X"):
        run_of(found, ReadOptions())
    run = run_of(found, ReadOptions(metric="*correctness*mean", max_reward=2.0))
    assert [point.pass_rate for point in run.evals] == pytest.approx(RIGHT.tolist())


def test_what_a_wrong_answer_earns():
    """As of the notebooks of Unsloth: 3.5 for the right number, -1.5 for any other."""
    mean_N, sd_N = 5.0 * RIGHT - 1.5, 5.0 * np.sqrt(RIGHT * (1 - RIGHT))
    columns = {"eval_rewards/check/mean": mean_N, "eval_rewards/check/std": sd_N, "eval_reward": mean_N}
    found = log(columns | {"completions/mean_length": STEPS})
    run = run_of(found, ReadOptions(max_reward=3.5, min_reward=-1.5))
    assert [point.pass_rate for point in run.evals] == pytest.approx(RIGHT.tolist())
    assert any("(reward + 1.5) / 5" in text for text in run.warnings)
    with pytest.raises(InputError, match=r"lies between -1 and .*; --min-reward says what a wrong"):
        run_of(found, ReadOptions(max_reward=3.5))
    with pytest.raises(InputError, match="what a right answer earns is a number above"):
        ReadOptions(max_reward=1.0, min_reward=1.0)


def test_rewards_that_are_told_are_held_against_their_spread_and_their_name():
    found = trl({"correctness_reward_func": (RIGHT, 2.0), "int_reward_func": (FORMAT, 0.5)})
    with pytest.raises(InputError, match="a right answer earns about 2;"):
        run_of(found, ReadOptions(max_reward=1.0))
    run = run_of(found, ReadOptions(max_reward=4.0))
    assert any("earns about 2 more than a wrong one, and not 4" in text for text in run.warnings)
    with pytest.raises(InputError, match=r"is already a share in .*: leave out --max-reward or --percent;"):
        run_of(verl(math500=MATH), ReadOptions(max_reward=100.0))


@pytest.mark.parametrize("name", ["rewards/correctness_reward_func/mean", "rewards/format/mean", "reward"])
def test_a_reward_of_training_is_one_under_any_name(name):
    columns = {name: RIGHT, "eval_rewards/a/mean": RIGHT, "completions/mean_length": 100 + STEPS}
    assert metric_of(log(columns), metric=name).kind == "training reward"
    assert metric_of(log({name: RIGHT}), metric=name).kind == "training reward"


@pytest.mark.parametrize("pattern", ["*correctness*", "*reward*", "*", "rewards/*,eval_rewards/c*/mean"])
def test_a_pattern_means_what_is_held_out(pattern):
    found = trl({"correctness": (RIGHT, 1.0), "format": (FORMAT, 0.2)})
    training = {"rewards/correctness/mean": RIGHT, "rewards/correctness/std": RIGHT, "entropy": RIGHT}
    series = {name: one.value_N for name, one in found.metrics.items()}
    found = log(training | series)
    if pattern.startswith("rewards"):
        assert metric_of(found, metric=pattern).name == "rewards/correctness/mean"
        pattern = pattern.replace("rewards/*", "gone/*", 1)
    assert metric_of(found, metric=pattern).name == "eval_rewards/correctness/mean"
    with pytest.raises(InputError, match="no metric like 'entr\\*' is a known pass rate or reward"):
        metric_of(found, metric="entr*")
    assert metric_of(found, metric="entropy").name == "entropy"


def test_prompts_of_a_data_set_that_there_is_not_are_said():
    run = run_of(verl(math500=MATH), ReadOptions(prompts={"math": 500}))
    assert any("no held-out data set or metric 'math', whose prompts" in one for one in run.warnings)


def test_one_reward_function_stands_in_with_a_warning():
    run = run_of(trl({"my_reward": (RIGHT, 1.0)}), ReadOptions())
    assert run.metric.kind == "reward in [0, 1]"
    assert run.metric.is_ambiguous
    assert any("used as the pass rate" in text for text in run.warnings)


def test_a_mean_reward_that_a_trainer_calls_an_accuracy_is_a_reward():
    """NeMo RL logs the mean reward of its validation as an accuracy, whatever earns how much."""
    nemo_rl = {"validation/accuracy": RIGHT, "timing/train/total_step_time": 0 * RIGHT + 60}
    run = run_of(log(nemo_rl), ReadOptions())
    assert (run.metric.kind, run.metric.is_ambiguous) == ("reward in [0, 1]", True)
    assert any("which is right only if a right answer earns 1 and any other 0" in w for w in run.warnings)
    named = run_of(log(nemo_rl), ReadOptions(metric="validation/accuracy"))
    assert (named.metric.kind, named.metric.is_ambiguous) == ("pass rate", False)
    with pytest.raises(InputError, match="max_reward"):
        run_of(log(nemo_rl | {"validation/accuracy": 3 * RIGHT}), ReadOptions())


def test_rewards_of_minus_1_and_1_are_told_by_their_spread_too():
    mean_N = 2 * RIGHT - 1
    columns = {
        "eval_rewards/r/mean": mean_N,
        "eval_rewards/r/std": np.sqrt(1 - mean_N**2),
        "eval_reward": mean_N,
    }
    run = run_of(log(columns | {"completions/mean_length": STEPS}), ReadOptions())
    assert [point.pass_rate for point in run.evals] == pytest.approx(RIGHT.tolist())
    columns["eval_rewards/r/std"] = np.full(len(STEPS), 0.2)
    with pytest.raises(InputError, match="does not consist of rewards of -1 and 1"):
        run_of(log(columns | {"completions/mean_length": STEPS}), ReadOptions())


AIME = np.round(RIGHT * 30 * 16) / 480
MATH = np.round((RIGHT + 0.2) * 500) / 500


def verl(**sets):
    names = {f"val-core/{name}/acc/mean@{16 if 'aime' in name else 1}": value for name, value in sets.items()}
    return log(names | {"critic/score/mean": RIGHT, "actor/pg_loss": 0 * RIGHT})


def test_of_several_data_sets_the_one_with_most_prompts_is_taken_and_that_is_said():
    run = run_of(verl(aime24=AIME, aime25=AIME, math500=MATH), ReadOptions())
    metric = run.metric
    assert (metric.dataset, metric.n_prompts, metric.n_samples) == ("math500", 500, 1)
    assert (
        str(metric)
        == "val-core/math500/acc/mean@1, held-out pass rate of math500 (500 prompts, 1 sample each)"
    )
    assert len(metric.others) == 2
    assert any("that with most prompts is taken" in text for text in run.warnings)
    only = metric_of(verl(aime24=AIME, aime25=AIME, math500=MATH), metric="*aime25*")
    assert (only.dataset, only.n_prompts, only.n_samples, only.is_ambiguous) == ("aime25", 30, 16, False)


def test_completions_are_not_called_prompts():
    found = log({"eval/aime-pass@1": AIME, "eval/math-pass@1": MATH, "rollout/raw_reward": RIGHT})  # slime
    run = run_of(found, ReadOptions())
    assert (run.metric.dataset, run.metric.n_prompts, run.metric.n_samples) == ("math", 0, 0)
    assert str(run.metric) == "eval/math-pass@1, held-out pass rate of math"
    assert any("that with most completions is taken" in text for text in run.warnings)
    with pytest.raises(InputError, match=r"--pooled weights by prompts, and those of .* not logged"):
        run_of(found, ReadOptions(pooled=True))


def test_data_sets_are_pooled_by_their_prompts():
    found = verl(aime24=AIME, math500=MATH)
    run = run_of(found, ReadOptions(pooled=True))
    expected = (30 * AIME + 500 * MATH) / 530
    assert [point.pass_rate for point in run.evals] == pytest.approx(expected.tolist())
    assert run.metric.n_prompts == 530
    given_ = run_of(found, ReadOptions(pooled=True, prompts={"aime24": 60, "math500": 500}))
    expected = (60 * AIME + 500 * MATH) / 560
    assert [point.pass_rate for point in given_.evals] == pytest.approx(expected.tolist())
    with pytest.raises(InputError, match=r"--pooled weights by prompts, .* not logged.*--prompts"):
        run_of(verl(aime24=RIGHT, math500=RIGHT), ReadOptions(pooled=True))
    with pytest.raises(InputError, match="--pooled needs two held-out data sets"):
        run_of(verl(math500=MATH), ReadOptions(pooled=True))


def test_steps_that_only_one_of_the_pooled_data_sets_has_are_reported():
    builder = LogBuilder("log", "test", "run", lambda name: True)
    often, seldom = (f"val-core/{name}/acc/mean@16" for name in "ab")
    for n, step in enumerate(STEPS):
        builder.add(float(step), math.nan, {often: AIME[n]} | ({seldom: MATH[n]} if n % 2 else {}))
    run = run_of(builder.build(), ReadOptions(pooled=True, prompts={"a": 30, "b": 500}))
    assert len(run.evals) == 10
    assert run.config["left_out"]["reasons"] == {"not of all data sets": 10}
    assert any(
        text.startswith("10 evaluations left out, at a step that not all data sets have: ")
        for text in run.warnings
    )


def test_completions_are_told_by_the_fractions_only_where_that_is_certain():
    rng = np.random.default_rng(0)
    assert completions_of(rng.integers(200, 900, 12) / 1319) == 1319
    assert completions_of(rng.integers(50, 400, 12) / 480) == 480
    assert completions_of(rng.integers(100, 400, 30) / 500) == 500
    rounded = np.round(rng.random(24), 3)
    for first in (0.2682, 8 / 30, 400 / 1319, 0.5):  # a first evaluation with all its digits
        assert completions_of(np.append(first, rounded)) == 0
        assert completions_of(np.append(first, np.round(rounded, 2))) == 0
    for values in (rng.random(50), np.round(rng.random(50), 3), np.round(rng.random(50), 4), np.zeros(20)):
        assert completions_of(values) == 0


@pytest.mark.parametrize(
    ("values", "shares", "said"),
    [
        ([0.0, 1.0], [0.0, 1.0], ""),
        ([-1.0, 0.0, 1.0], [0.0, 0.5, 1.0], "rewards of -1 and 1"),
        ([0.5, 1.0 + 1e-9], [0.5, 1.0], ""),
    ],
)
def test_values_as_shares(values, shares, said):
    found, how, why_not = as_share(np.array(values), "x")
    assert found.tolist() == pytest.approx(shares)
    assert said in how
    assert bool(said) == bool(how)
    assert not why_not


@pytest.mark.parametrize(
    "values", [[-1.2, 0.5], [0.0, 120.0], [-3.0, 50.0], [0.0, 9.0], [0.5, 45.0], [-0.01, 0.5], [0.2, 1.01]]
)
def test_what_is_no_share_is_refused(values):
    found, _, why_not = as_share(np.array(values), "reward")
    assert not len(found)
    assert why_not.startswith("'reward' ")


@pytest.mark.parametrize("name", ["acc_percent", "eval/Pct", "acc (%)"])
@pytest.mark.parametrize("high", [0.76, 1.0, 1.3, 60.0])
def test_a_name_that_says_percent_is_believed_below_1_too(name, high):
    """A run that reads itself as it goes on must not change by a factor of 100 where it passes 1."""
    found, how, _ = as_share(np.array([0.2, high]), name)
    assert found.tolist() == pytest.approx([0.002, high / 100])
    assert "named for percentages: divided by 100" in how
    found, how, _ = as_share(np.array([0.2, 0.76]), "eval/percentile_50")
    assert (found.tolist(), how) == ([0.2, 0.76], "")


def test_samples_of_a_prompt_by_the_name():
    assert [n_samples(name) for name in ("val/mean@32", "eval/x/avg@8", "acc", "best@9")] == [32, 8, 0, 0]


def test_kinds_by_name():
    right = [
        "acc",
        "eval/accuracy",
        "gsm8k_acc",
        "pass@1",
        "eval/pass_at_1",
        "solve_rate",
        "is_correct",
        "pass_rate",
        "eval_rewards/MathAccuracy/mean",
        "AccuracyReward",
    ]
    assert all(map(is_named_for_correctness, right))
    others = [
        "reward",
        "eval_reward",
        "pass@8",
        "accelerate",
        "format_reward",
        "surpass",
        "pass_at_16",
        "PassAt8Reward",
        "CopyrightReward",
        "score",
    ]
    assert not any(map(is_named_for_correctness, others))
    assert kind_of("heldout_math") == "pass rate"  # as the user says
    assert kind_of("eval/reward") == "reward in [0, 1]"
    assert kind_of("train/accuracy") == "training reward"


NAMES = st.sampled_from(
    [
        name
        for one in VOCABULARIES
        for role in ("pass_rate", "eval_reward", "reward_parts", "train_reward")
        for pattern in getattr(one, role)
        for name in [pattern.replace("{set}", "s").replace("*", "x")]
    ]
    + ["reward", "eval/my_metric", "loss", "score", "val/acc_percent"]
)
SCALES = st.tuples(st.floats(-12, 12), st.floats(0, 120))


@settings(max_examples=300)
@given(
    st.dictionaries(NAMES, SCALES, min_size=1, max_size=5),
    st.sampled_from(["", *BY_TRAINER]),
    st.none() | NAMES,
)
def test_no_verdict_from_a_metric_that_leaves_0_to_1_and_none_without_its_name(metrics, trainer, named):
    """Whatever the names and scales in a log."""
    columns = {name: low + (high - low) * RIGHT for name, (low, high) in metrics.items()}
    asked = ReadOptions(metric=named, trainer=trainer or None)
    try:
        run = run_of(log(columns), asked)
    except InputError:
        return
    metric, values = run.metric, columns[run.metric.name]
    told = " ".join(run.warnings)
    is_said = metric.name in told and ("divided by" in told or "rewards of -1 and 1" in told)
    assert is_said or (values.min() >= -1e-6 and values.max() <= 1 + 1e-6)
    if named is None:
        assert metric.split == "held-out"
        assert metric.kind == "pass rate" or "used as the pass rate" in told
    try:
        found = fit(run, x="steps")
    except CannotAnswerError:
        return
    assert found.to_json()["metric"]["name"] == metric.name
    assert str(found).startswith(metric.name)
    if metric.split == "training":
        assert not found.identified
        assert found.verdict(0.5, 1000) == "training reward"


@pytest.mark.parametrize("trainer", BY_TRAINER)
def test_every_held_out_name_of_a_trainer_has_a_kind(trainer):
    vocabulary = BY_TRAINER[trainer]
    for role, kinds in (("pass_rate", {"pass rate"}), ("eval_reward", {"reward in [0, 1]", "pass rate"})):
        for pattern in getattr(vocabulary, role):
            name = pattern.replace("{set}", "s").replace("<set>", "s").replace("*", "4")
            record = as_run(log({name: RIGHT}), vocabulary, ReadOptions())
            assert record.metric.kind in kinds
            assert record.metric.dataset == ("s" if "set" in re.findall(r"\w+", pattern) else "")
