"""A foreign log as a run: what is the pass rate, what was assumed, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import Points, fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.flops import ModelCost
from scalerl.ingest.imported import as_run
from scalerl.ingest.logs.log import LogBuilder
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.vocabularies import ANY, Vocabulary

WORDS = Vocabulary(
    "mine",
    signs=(),
    pass_rate=("val/{set}/acc", "val/{set}/mean@*"),
    train_reward=("reward",),
    entropy=("entropy",),
    truncated=("cut",),
    finished=("stopped",),
    step_seconds=("seconds",),
    devices=("gpus",),
    mean_length=("length",),
)


def log(rows, name="run"):
    builder = LogBuilder("log", "test", name, lambda name: True)
    for step, values in rows:
        builder.add(step, 1000.0 + step, values)
    builder.config.update({"seed": 3, "model": "m", "list": [1]})
    return builder.build()


def steps(n, **values):
    return [(step, {"seconds": 2.0, "gpus": 2, **values}) for step in range(1, n + 1)]


def test_the_metric_with_most_evaluations_is_the_pass_rate_and_the_others_are_named():
    rows = [*steps(8, reward=0.3, entropy=0.9)]
    rows += [(step, {"val/math/mean@16": 0.1 * step}) for step in (0, 4, 8)]
    rows += [(8, {"val/aime/mean@16": 0.2})]
    found = as_run(log(rows), WORDS, ReadOptions())
    assert [point.step for point in found.evals] == [0, 4, 8]
    assert [point.pass_rate for point in found.evals] == pytest.approx([0, 0.4, 0.8])
    np.testing.assert_allclose(found.compute("gpu_hours"), np.array([0, 16, 32]) / 3600)
    assert [point.n_samples for point in found.evals] == [16, 16, 16]
    assert [point.entropy for point in found.evals][1:] == [0.9, 0.9]
    assert found.config["taken"]["other held-out metrics"] == "val/aime/mean@16 (--y NAME)"
    assert found.config["taken"]["GPU-hours"] == "seconds, x 2 devices (gpus)"
    assert found.default_axis == "gpu_hours"
    (said,) = found.warnings
    assert said == (
        "of 2 held-out metrics the first, as the prompts of none are known, is taken, 'val/math/mean@16'; "
        "--y NAME takes another of val/aime/mean@16"
    )
    metric = found.metric
    assert (metric.name, metric.kind, metric.split) == ("val/math/mean@16", "pass rate", "held-out")
    assert (metric.dataset, metric.n_prompts, metric.n_samples) == ("math", 0, 16)
    assert metric.others == ("val/aime/mean@16",)
    assert metric.is_ambiguous
    assert found.config["trainer_config"] == {"seed": 3, "model": "m"}
    assert found.steps()[0] == {"step": 1, "time": 1001.0, "reward_mean": 0.3, "entropy": 0.9}


@pytest.mark.parametrize("amount", [16, "16"])
def test_a_log_that_says_its_budget_is_read_on_that_axis(amount):
    """As those of our own runs do, of which MLflow keeps all as text."""
    said = log([*steps(8), (0, {"val/a/acc": 0.1}), (8, {"val/a/acc": 0.4})])
    for config, axis in (
        ({"budget.kind": "steps", "budget.amount": amount}, "steps"),
        ({"budget.kind": "steps", "budget.amount": "much"}, "gpu_hours"),
        ({"budget.kind": "dogs", "budget.amount": amount}, "gpu_hours"),
    ):
        found = as_run(replace(said, config=config), WORDS, ReadOptions())
        assert found.default_axis == axis
        assert found.config.get("budget") == ({"kind": "steps", "amount": 16.0} if axis == "steps" else None)


def test_tokens_count_once_and_how_many_were_trained_is_not_known():
    words = replace(WORDS, tokens=("tokens",))
    found = as_run(log([*steps(4, tokens=100), (4, {"val/a/acc": 0.4})]), words, ReadOptions())
    assert found.compute("tokens").tolist() == [400]
    assert found.config["taken"]["tokens"] == "tokens, added up"
    assert "tokens_processed" not in found.logged_axes()


def test_the_tokens_processed_are_those_that_a_log_of_ours_says():
    words = replace(WORDS, tokens_so_far=("generated",), tokens_processed_so_far=("processed",))
    rows = [*steps(4), (4, {"val/a/acc": 0.4, "generated": 400, "processed": 700})]
    (point,) = as_run(log(rows), words, ReadOptions()).evals
    assert (point.tokens.generated, point.tokens.trained) == (400, 300)


def test_of_the_flops_a_quarter_is_the_sampling():
    words = replace(WORDS, tokens=("tokens",))
    cost = ModelCost(matrix_weights=1000, attention_per_position=10, model="m")
    rows = [*steps(4, tokens=100, length=9.0), (4, {"val/a/acc": 0.4})]
    (point,) = as_run(log(rows), words, ReadOptions(model=cost)).evals
    forward = 4 * 100 * (2 * 1000 + 10 * 5)
    # Training is a forward pass too, and a backward one of twice that.
    assert (point.flops.generate, point.flops.train) == (forward, 3 * forward)


def test_a_reward_of_training_is_fitted_only_by_its_name_and_without_a_verdict():
    with pytest.raises(InputError, match=r"no metric is held out: 'reward' is a training reward.*--y reward"):
        as_run(log(steps(12, reward=0.4)), WORDS, ReadOptions())
    rows = [(step, {"reward": 0.2 + 0.5 / (1 + 6 / step)}) for step in range(1, 60)]
    record = as_run(log(rows), WORDS, ReadOptions(metric="reward"))
    assert (record.metric.kind, record.metric.split) == ("training reward", "training")
    found = fit(record, x="steps")
    held_out = fit(Points.from_arrays(*zip(*[(s, v["reward"]) for s, v in rows], strict=True)))
    assert (held_out.identified, held_out.verdict(0.3, 60)) == (True, "go")
    assert (found.identified, found.verdict(0.3, 60)) == (False, "training reward")
    assert found.why == found.reasons(0.3, 60)
    assert "'reward' is a training reward" in found.why
    assert found.compute_to_identify is None


def test_what_may_be_held_out_is_named_beside_the_training_reward():
    rows = [(step, {"reward": 0.4, "kl": 0.1, "Eval Acc/MATH 500 (greedy)": 0.5}) for step in range(4)]
    with pytest.raises(InputError, match=r"verdict; name what is held out of Eval Acc/MATH 500 \(greedy\)$"):
        as_run(log(rows), WORDS, ReadOptions())


def test_a_bare_accuracy_is_not_called_a_training_reward():
    """It is what the user says of it: `--y accuracy` fits it as a pass rate."""
    rows = [(step, {"accuracy": 0.4}) for step in range(8)]
    with pytest.raises(InputError, match=r"no metric here is a known pass rate.*--y takes one of: accuracy$"):
        as_run(log(rows), ANY, ReadOptions())
    assert as_run(log(rows), ANY, ReadOptions(metric="accuracy")).metric.kind == "pass rate"


def test_too_few_evaluations_are_explained_by_those_left_out():
    record = as_run(log([(0, {"val/a/acc": 0.1 * n}) for n in range(8)]), WORDS, ReadOptions())
    with pytest.raises(
        CannotAnswerError, match=r": 1 evaluation \(7 evaluations left out, repeated at a step"
    ):
        fit(record, x="steps")


def test_a_metric_that_is_named_is_taken():
    rows = [*steps(4, reward=0.4), (4, {"val/a/acc": 0.5})]
    found = as_run(log(rows), WORDS, ReadOptions(metric="reward"))
    assert len(found.evals) == 4
    with pytest.raises(
        InputError, match="no metric 'rewards' with numbers; there are reward, val/a/acc, gpus"
    ):
        as_run(log(rows), WORDS, ReadOptions(metric="rewards"))


def test_a_log_without_a_pass_rate_says_what_there_is():
    with pytest.raises(InputError, match="--y takes one of: my_accuracy, gpus, seconds"):
        as_run(log(steps(3, my_accuracy=0.3)), WORDS, ReadOptions())


def test_what_is_said_names_a_metric_as_the_user_does():
    asked = ReadOptions(in_python=True)
    for rows in (steps(3, my_accuracy=0.3), steps(3, reward=1.3), steps(3, reward=-7.0)):
        with pytest.raises(InputError, match="metric=") as caught:
            as_run(log(rows), WORDS, asked)
        assert "--y" not in str(caught.value)


def test_a_share_of_truncated_completions_that_never_moves_is_doubted():
    found = as_run(log(steps(12, reward=0.4, cut=0.25)), WORDS, ReadOptions(metric="reward"))
    assert "truncated completions is 0.25 in all 12 rows" in found.warnings[-1]
    found = as_run(log(steps(12, reward=0.4, stopped=1.0)), WORDS, ReadOptions(metric="reward"))
    assert found.steps()[0]["truncated"] == 0
    assert found.warnings == ()  # none is cut, which may well be so
    assert math.isclose(found.evals[0].truncated, 0.0)
    found = as_run(log(steps(3, reward=0.4, cut=25.0)), WORDS, ReadOptions(metric="reward"))
    assert "truncated completions lies between 25 and 25: no share" in found.warnings[-1]


@pytest.mark.parametrize(("config", "earned"), [({}, 10.0), ({"unit": 5}, 5.0), ({"unit": "many"}, 10.0)])
def test_rewards_in_units_of_a_right_answer_are_divided_by_it(config, earned):
    words = Vocabulary("mine", signs=(), eval_reward=("scores",), scaled=(("scores", "unit", 10.0),))
    builder = LogBuilder("log", "test", "run", lambda name: True)
    for step in (1, 2):
        builder.add(step, math.nan, {"scores": 2.0 * step})
    builder.config.update(config)
    found = as_run(builder.build(), words, ReadOptions())
    assert [point.pass_rate for point in found.evals] == [2 / earned, 4 / earned]
    assert found.warnings[-1].startswith(f"'scores' is in units of unit: divided by {earned:g}")


def test_evaluations_without_a_number_are_counted():
    builder = LogBuilder("there", "jsonl", "a run", lambda name: name == "val/a/acc")
    for step, rate in enumerate([0.1, math.nan, 0.3, math.inf, 0.4]):
        builder.add(step, math.nan, {"val/a/acc": rate, "loss": math.nan})
    found = as_run(builder.build(), WORDS, ReadOptions())
    assert [point.pass_rate for point in found.evals] == [0.1, 0.3, 0.4]
    assert "1 evaluation of 'val/a/acc' left out, NaN: step 1" in found.warnings
