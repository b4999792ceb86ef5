"""The compute behind a foreign log, against totals that are worked by hand."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from scalerl.errors import InputError
from scalerl.ingest.counters import counters as counters_of
from scalerl.ingest.flops import ModelCost, model_cost
from scalerl.ingest.load import load_run, run_of
from scalerl.ingest.logs.log import Log, LogBuilder, Series
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.vocabularies import BY_TRAINER, Vocabulary
from scalerl.record.evaluation import compute_of

WORDS = Vocabulary(
    "mine",
    signs=("sign",),
    step_seconds=("seconds",),
    evaluation_seconds=("testing",),
    devices=("gpus",),
    tokens=("tokens",),
    tokens_so_far=("all_tokens",),
    mean_length=("length",),
    device_sums=("nodes * gpus_per_node + engines * tp", "nodes * gpus_per_node"),
    sample_sums=("prompts * n",),
)


def log(rows, config=()):
    builder = LogBuilder("log", "test", "run", lambda name: True)
    for step, time, values in rows:
        builder.add(step, time, values)
    builder.config.update(config)
    return builder.build()


def counters(*args, **options):
    made, warnings = counters_of(*args, **options)
    names = {"GPU-hours": "device_seconds", "FLOPs": "flops"}
    none = dict.fromkeys(("device_seconds", "flops", "tokens", "tokens_processed", "samples"))
    found = {names.get(what, what): counter for what, counter in made.items()}
    return SimpleNamespace(**none | found, warnings=tuple(warnings))


def test_seconds_of_steps_less_their_evaluations_on_all_devices():
    rows = [(step, math.nan, {"seconds": 10.0, "gpus": 4}) for step in (1, 2, 3, 4)]
    # One before training, which is in no step's time, and one in that of step 2.
    rows += [(0, math.nan, {"testing": 9.0}), (2, math.nan, {"testing": 6.0})]
    made = counters(log(rows), WORDS)
    assert [made.device_seconds.at(step) for step in range(7)] == [0, 40, 56, 96, 136, 176, 216]
    assert made.device_seconds.at(2.5) == 76
    assert made.device_seconds.how == "seconds less testing, x 4 devices (gpus)"
    assert made.warnings == ()


def test_a_trainer_that_logs_every_tenth_step_logs_means():
    made = counters(log([(step, math.nan, {"seconds": 3.0, "tokens": 7}) for step in (10, 20, 30)]), WORDS)
    assert made.device_seconds.total_N.tolist() == [0, 30, 60, 90]
    assert made.tokens.total_N.tolist() == [0, 70, 140, 210]
    assert made.warnings == ("the number of devices is not logged: compute is for one device (--devices N)",)


def test_steps_that_count_from_0_are_the_updates_before_their_evaluation():
    """AReaL evaluates after the update of step 0, too: that is no evaluation before training."""
    rows = [
        (n, 60.0 * n, {"ppo_actor/n_seqs": 64.0, "timeperf/train_step": 9.0, "eval-rollout/reward": 0.1 * n})
        for n in range(4)
    ]
    run = run_of(log(rows), ReadOptions(devices=1))
    assert run.config["source"]["trainer"] == "areal"
    assert [(point.step, point.samples) for point in run.evals] == [(1, 64), (2, 128), (3, 192), (4, 256)]
    assert run.training_compute("gpu_hours") * 60 == pytest.approx([1, 2, 3, 4])
    assert any("step 9 of the log is step 10 here" in warning for warning in run.warnings)
    other = run_of(log(rows), ReadOptions(devices=1, trainer="unknown", metric="eval-rollout/reward"))
    assert [point.step for point in other.evals] == [0, 1, 2, 3]


def test_seconds_of_a_row_are_no_mean_of_its_steps():
    rows = [(2 * n, math.nan, {"perf/step_time": 100.0}) for n in range(4)]  # slime, two updates a rollout
    made = counters(log(rows), BY_TRAINER["slime"])
    assert [made.device_seconds.at(step) for step in (0, 2, 6)] == [0, 100, 300]


def test_devices_are_taken_from_the_config_and_the_user_has_the_last_word():
    rows = [(1, math.nan, {"seconds": 1.0})]
    config = {"nodes": 2, "gpus_per_node": 8, "prompts": 16, "n": 4}
    made = counters(log(rows, config), WORDS)
    assert made.device_seconds.how == "seconds, x 16 devices (nodes x gpus_per_node)"
    assert made.samples.at(1) == 64
    for engines, total, of in (
        (3, 22, "(nodes x gpus_per_node + engines x tp)"),
        (0, 16, "(nodes x gpus_per_node)"),  # none of their own
        (-1, 16, "(nodes x gpus_per_node)"),
        (None, 16, "(nodes x gpus_per_node)"),
        (math.inf, 16, "(nodes x gpus_per_node)"),
    ):
        made = counters(log(rows, config | {"engines": engines, "tp": 2}), WORDS)
        assert made.device_seconds.how == f"seconds, x {total} devices {of}"
    assert counters(log(rows, config), WORDS, devices=3).device_seconds.total_N.tolist() == [0, 3]


def test_the_time_of_day_without_the_hours_in_which_nothing_ran():
    times = [1000.0 + 20 * step for step in range(5)]
    times += [times[-1] + 20 * 3600 + 20 * step for step in range(1, 5)]  # a night between
    made = counters(log([(step, time, {"x": 1.0}) for step, time in enumerate(times)]), WORDS, devices=1)
    assert made.device_seconds.total_N.tolist() == [20.0 * step for step in range(9)]
    assert "less 1 interruptions of 20 hours in all" in made.device_seconds.how


@pytest.mark.parametrize("order", [1, -1])
def test_rows_that_were_written_at_once_tell_no_time(order):
    """As of evaluations of checkpoints that a script logs after the run, also the last one first."""
    rows = [(10 * n, 1000.0 + order * n * 0.002, {"eval/acc": 0.5}) for n in range(8)]
    made = counters(log(rows), WORDS, devices=1)
    assert made.device_seconds is None
    assert made.warnings == ("rows were written at once, not in training: their times make no GPU-hours",)


@pytest.mark.parametrize(("pause", "lost"), [(55.0, 0.0), (65.0, 65.0)])
def test_less_than_a_minute_more_is_no_interruption(pause, lost):
    times = [1000.0 + step + pause * (step > 4) for step in range(9)]  # many times the usual second
    made = counters(log([(step, time, {"x": 1.0}) for step, time in enumerate(times)]), WORDS, devices=1)
    assert made.device_seconds.total_N[-1] == 8 + pause - lost
    assert ("interruption" in made.device_seconds.how) == (lost > 0)


def test_a_run_that_was_begun_again_counts_once():
    rows = [(step, 100.0 + 10 * step, {"loss": 0.1}) for step in range(6)]
    rows += [(step, 5000.0 + 10 * step, {"loss": 0.2}) for step in range(3, 8)]
    restarted = log(rows)
    assert restarted.metrics["loss"].step_N.tolist() == list(range(8))
    assert restarted.metrics["loss"].value_N.tolist() == [0.1] * 3 + [0.2] * 5
    (note,) = restarted.notes
    assert note == (
        "the run was restarted at step 3: what was logged before for steps 3 to 5 is superseded "
        "(3 values of all metrics)"
    )
    made = counters(restarted, WORDS, devices=1)
    assert made.device_seconds.total_N.tolist() == [10.0 * step for step in range(8)]


def test_evaluations_that_are_late_are_no_restart():
    rows = [(step, math.nan, {"x": 1.0}) for step in range(5)]
    rows += [(2, math.nan, {"late": 0.5}), (5, math.nan, {"x": 1.0}), (4, math.nan, {"late": 0.6})]
    found = log(rows)
    assert len(found.metrics["x"]) == 6
    assert found.metrics["late"].step_N.tolist() == [2, 4]
    assert found.notes == ()


@pytest.mark.parametrize("first", [math.nan, 1000.0])
def test_evaluations_of_a_branch_that_was_given_up_are_forgotten(first):
    rows = [
        (step, first + step, {"loss": 1.0, **({"late": 0.5} if step % 20 == 0 else {})}) for step in range(95)
    ]
    rows += [(step, first + 100 + step, {"loss": 2.0}) for step in range(50, 70)]
    found = log(rows)
    assert found.metrics["loss"].step_N.tolist() == list(range(70))
    assert found.metrics["late"].step_N.tolist() == [0, 20, 40]
    assert "before for steps 50 to 94 is superseded (47 values of all metrics)" in found.notes[0]


def test_only_what_a_restarted_run_had_logged_is_forgotten():
    # A metric that is a row late, and evaluations that end in another order, are no restarts.
    rows = [(step, math.nan, {"x": 1.0}) for step in range(9)]
    for step in (6, 8, 4):
        rows.append((step, math.nan, {"late": 0.5}))
    rows += [(10, math.nan, {"y": 1.0}), (9, math.nan, {"y": 1.0})]
    found = log(rows)
    assert len(found.metrics["x"]) == 9
    # Two files of processes that ran at one time, read one after another.
    rows = [
        (step, 100.0 + step, {"x": 1.0, **({"late": 0.5} if step % 20 == 0 else {})}) for step in range(95)
    ]
    rows += [(step, 100.0 + step, {"x": 2.0}) for step in range(95)]
    assert log(rows).metrics["late"].step_N.tolist() == [0, 20, 40, 60, 80]


def test_seconds_of_steps_that_may_be_milliseconds_are_reported():
    """Steps of 20 s, logged as such and as milliseconds; a step of half an hour is no reason to doubt."""
    for each, doubted in ((20.0, False), (1800.0, False), (20_000.0, True)):
        found = counters(log([(step, math.nan, {"seconds": each}) for step in (1, 2, 3)]), WORDS, devices=2)
        assert any("1,000 times too high" in text for text in found.warnings) == doubted
        assert found.device_seconds.total_N[-1] == 2 * 3 * each


def test_a_log_without_its_beginning_says_so():
    made = counters(log([(step, math.nan, {"seconds": 2.0}) for step in (500, 510, 520)]), WORDS, devices=1)
    assert [made.device_seconds.at(step) for step in (0, 490, 500, 520)] == [0, 0, 20, 60]
    assert made.warnings == ("the log begins at step 490: what was spent before is not in it",)


def test_tokens_since_the_start_never_fall():
    made = counters(
        log([(s, math.nan, {"all_tokens": t}) for s, t in ((1, 5), (2, 9), (3, 8), (4, 12))]), WORDS
    )
    assert made.tokens.total_N.tolist() == [0, 5, 9, 9, 12]


def test_tokens_that_begin_anew_are_added_to_those_before():
    """As of a process that was restarted after steps 60 and 120, and counts from 0."""
    rows = [(step, math.nan, {"all_tokens": 1000 * ((step - 1) % 60 + 1)}) for step in range(1, 181)]
    made = counters(log(rows), WORDS)
    assert [made.tokens.at(step) for step in (0, 60, 61, 120, 121, 180)] == [
        0,
        60e3,
        61e3,
        120e3,
        121e3,
        180e3,
    ]
    (warning,) = made.warnings
    assert warning.startswith("'all_tokens' begins anew at step 61, 121: ")


def test_one_row_that_falls_is_no_new_beginning():
    rows = [(step, math.nan, {"all_tokens": 0 if step == 5 else 10 * step}) for step in range(1, 9)]
    made = counters(log(rows), WORDS)
    assert made.tokens.total_N.tolist() == [0, 10, 20, 30, 40, 40, 60, 70, 80]
    assert made.warnings == ()


def test_flops_by_hand():
    cost = ModelCost(matrix_weights=1000, attention_per_position=10, model="m")
    rows = [(1, math.nan, {"all_tokens": 100, "length": 9.0})]
    made = counters(log(rows), WORDS, model=cost)
    # Sampled once, trained with a backward pass of twice the forward: four forward passes a token.
    assert made.flops.total_N.tolist() == [0, 4 * 100 * (2 * 1000 + 10 * 5)]
    assert counters(log([(1, 0.0, {"x": 1})]), WORDS, model=cost).flops is None


CONFIGS = {
    "LlamaConfig": {"num_key_value_heads": 2},
    "Qwen3Config": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "GPTNeoXConfig": {},
    # Without a gate the feed-forward part has two matrices.
    "ArceeConfig": {},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PhiConfig": {},
    "Starcoder2Config": {"num_key_value_heads": 2},
    "MixtralConfig": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        **{"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8},
        **{"num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    },
    "Qwen2MoeConfig": {
        **{"num_key_value_heads": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
        **{"num_experts": 8, "num_experts_per_tok": 2},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cost_of_a_model_is_that_of_its_matrices(name, tmp_path):
    import torch
    import transformers

    from scalerl.rl.model.causal_lm import FlopCount

    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(transformers, name)(**shape, vocab_size=99, **CONFIGS[name])
    with torch.device("meta"):
        counted = FlopCount.of(transformers.AutoModelForCausalLM.from_config(config))
    config.save_pretrained(tmp_path)
    cost = model_cost(tmp_path)
    assert (cost.matrix_weights, cost.attention_per_position) == (
        counted.matrix_weights,
        counted.attention_per_position,
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of 'linear_attention' are not",
        ),
        ({"layer_types": ["conv"] * 2}, "layers of 'conv' are not supported by --model"),
        ({"mamba_d_state": 16}, "layers with a state .* are not supported by --model"),
        (
            {"moe_num_experts": 8, "moe_k": 2},
            "experts by the name 'moe_num_experts' are not supported by --model",
        ),
        (
            {"interleave_moe_layer_step": 1, "num_local_experts": 4},
            "experts in some layers .* are not",
        ),
        ({"kv_lora_rank": 8}, "latent attention is not supported by --model"),
    ],
)
def test_a_model_with_parts_that_are_not_counted_is_refused(part, message, tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "layer_types": ["full_attention"] * 2}))
    assert model_cost(tmp_path).matrix_weights == 2 * (4 * 64 * 64 + 3 * 64 * 256) + 64 * 99
    (tmp_path / "config.json").write_text(json.dumps({**shape, **part}))
    with pytest.raises(InputError, match=message):
        model_cost(tmp_path)


def test_a_config_that_says_nothing_of_a_model_is_refused(tmp_path):
    for text, message in (
        ("[1]", "expected one JSON object"),
        ("{", "not JSON"),
        ('{"hidden_size": 3}', "no 'num_hidden_layers': expected the config.json of a model"),
        ('{"hidden_size": "many"}', "hidden_size is 'many': expected a whole number, 1 to 1000000000$"),
        ('{"hidden_size": 8, "num_hidden_layers": 513}', "num_hidden_layers is 513: .* 1 to 512$"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            model_cost(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        model_cost(tmp_path / "nowhere")


def test_what_is_no_number_is_passed_over():
    values = {"a": "0.5", "b": True, "c": math.nan, "d": math.inf, "e": None, "f": [1], "g": 10**400}
    found = log([(1, math.nan, {**values, "h": np.float32(0.5), "i": 3})])
    assert set(found.metrics) == {"h", "i"}


def test_what_no_run_has_is_left_out():
    rows = [(n, math.nan, {"seconds": 1e308, "tokens": 5.0}) for n in range(1, 5)]
    made = counters(log(rows), WORDS, devices=8)
    assert made.device_seconds is None
    assert made.tokens is not None
    assert made.warnings == ("left out, as no run has so much: seconds, x 8 devices (as given)",)


SHARED = {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 4}
NODES = {"deployment.num_train_nodes": 2, "deployment.num_infer_nodes": 3, "deployment.gpus_per_node": 8}


@pytest.mark.parametrize(
    ("trainer", "config", "devices"),
    [
        ("verl", SHARED, 32),
        (
            "verl",
            SHARED | {"actor_rollout_ref.rollout.nnodes": 0, "actor_rollout_ref.rollout.n_gpus_per_node": 8},
            32,
        ),
        (
            "verl",
            SHARED | {"actor_rollout_ref.rollout.nnodes": 2, "actor_rollout_ref.rollout.n_gpus_per_node": 4},
            40,
        ),
        ("verl", SHARED | {"rollout.nnodes": 4, "rollout.n_gpus_per_node": 8}, 64),
        ("prime-rl", {"deployment.num_train_gpus": 2, "deployment.num_infer_gpus": 6}, 8),
        ("prime-rl", NODES | {"deployment.num_infer_replicas": 2}, 64),
    ],
)
def test_devices_of_a_config(trainer, config, devices):
    series = Series(np.array([1.0]), np.array([2.0]), np.array([math.nan]))
    log = Log("source", "jsonl", "a", {"timing_s/step": series, "time/step": series}, (), config)
    vocabulary = BY_TRAINER[trainer]
    made = counters(log, vocabulary)
    assert made.device_seconds is not None
    assert made.device_seconds.at(1) == 2 * devices
    assert made.warnings == ()


def lines(path, rows):
    path.write_text("".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in rows))
    return path


def checkpoints(folder, steps):
    """Results of checkpoints, of which no file says what training cost."""
    folder.mkdir()
    for step in steps:
        (folder / f"checkpoint-{step}.json").write_text(json.dumps({"accuracy": 0.2 + step / 1000}))
    return folder


def test_compute_of_evaluated_checkpoints_is_that_of_their_training_log(tmp_path):
    rows = [(step, {"timing_s/step": 36.0 * step, "actor/entropy": step / 10}) for step in range(1, 6)]
    log = lines(tmp_path / "train.jsonl", rows)
    results = checkpoints(tmp_path / "results", (0, 2, 4))
    run = load_run(results, training_log=log, devices=100)
    # 36 s x 100 devices are an hour: 0, then 1 + 2, then 3 + 4 more.
    assert [compute_of(one, "gpu_hours") for one in run.evals] == [0, 3, 10]
    assert [one.entropy for one in run.evals[1:]] == [0.2, 0.4]
    assert [row["entropy"] for row in run.steps()] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert run.config["taken"]["training log"] == str(log)
    assert load_run(results).logged_axes() == ("steps",)


def test_a_training_log_covers_all_evaluated_steps_or_is_refused(tmp_path):
    results = checkpoints(tmp_path / "results", (0, 20, 35))
    every_tenth = [(step, {"timing_s/step": 36.0}) for step in (10, 20, 30)]
    log = lines(tmp_path / "train.jsonl", every_tenth)
    assert compute_of(load_run(results, training_log=log, devices=1).evals[-1], "gpu_hours") == 0.35
    short = lines(tmp_path / "short.jsonl", every_tenth[:2])
    with pytest.raises(InputError, match=r"short.jsonl: ends at step 20, but step 35 was evaluated"):
        load_run(results, training_log=short)
    nothing = lines(tmp_path / "nothing.jsonl", [(step, {"actor/entropy": 0.1}) for step in range(40)])
    with pytest.raises(InputError, match=r"nothing.jsonl: no times, tokens or FLOPs"):
        load_run(results, training_log=nothing)


def test_a_training_log_is_of_one_run(tmp_path):
    log = lines(tmp_path / "train.jsonl", [(step, {"timing_s/step": 36.0}) for step in range(1, 40)])
    both = tmp_path / "both"
    both.mkdir()
    for run in ("a", "b"):
        checkpoints(both / run, (0, 20, 35))
    with pytest.raises(InputError, match=r"training_log= is of one run; choose it with run=: a, b"):
        load_run(both, training_log=log)
    assert compute_of(load_run(both, training_log=log, run="b", devices=1).evals[-1], "gpu_hours") == 0.35
    with pytest.raises(InputError, match=r"both: holds 2 runs; training_log= takes one"):
        load_run(both / "a", training_log=both)
