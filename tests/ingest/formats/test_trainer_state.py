import json
import math
import shutil

import numpy as np
import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings
from read_logs import read_logs

from scalerl import InputError, load_run
from scalerl.ingest.formats.trainer_state import FORMAT


def state(step, rows=None, **more):
    """As the Trainer writes it, with its keys in order."""
    if rows is None:
        rows = [{"step": n, "epoch": n / 10, "reward": 0.1 * n} for n in range(1, step + 1)]
    return json.dumps({"global_step": step, "log_history": rows, **more}, indent=2, sort_keys=True) + "\n"


def write(folder, text, name="trainer_state.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the real Trainer leaves: checkpoints and evaluations at steps 2, 4 and 6."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Rewarded(transformers.Trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "frac": 0.25 * self.state.global_step}, start_time)

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 8
    folder = tmp_path_factory.mktemp("trainer")
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Rewarded(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return folder / "out"


@pytest.mark.filterwarnings("ignore")
def test_of_the_trainer(trained):
    assert FORMAT.recognises(trained)
    (log,) = read_logs(FORMAT, trained, everything)
    assert log.name == "out"
    assert log.notes == ()
    assert log.metrics["loss"].step_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert log.metrics["eval_loss"].step_N.tolist() == [2, 4, 6]
    assert log.metrics["frac"].value_N.tolist() == [0.25 * step for step in range(1, 7)]
    assert np.isnan(log.metrics["loss"].time_N).all()
    assert log.config["max_steps"] == 6
    assert log.config["num_train_epochs"] == 2
    assert log.config["global_step"] == 6
    assert log.config["model_type"] == "llama"
    assert "grad_norm" in log.names
    assert "step" not in log.names
    (early,) = read_logs(FORMAT, trained / "checkpoint-4", everything)
    assert early.metrics["loss"].step_N.tolist() == [1, 2, 3, 4]
    (early,) = read_logs(FORMAT, trained / "checkpoint-4" / "trainer_state.json", everything)
    assert early.name == "out"
    (run,) = read_logs(FORMAT, trained.parent, everything)
    assert run.name == "out"


def test_the_newest_checkpoint_counts(tmp_path):
    for step in (5, 20, 100):
        write(tmp_path / f"checkpoint-{step}", state(step))
    (log,) = read_logs(FORMAT, tmp_path, lambda name: name == "reward")
    assert log.metrics["reward"].step_N[-1] == 100
    assert log.names == ("epoch", "reward")
    write(tmp_path, state(50))  # saved before the run was resumed
    assert read_logs(FORMAT, tmp_path, everything)[0].metrics["reward"].step_N[-1] == 100
    write(tmp_path, state(120))
    assert read_logs(FORMAT, tmp_path, everything)[0].metrics["reward"].step_N[-1] == 120


def test_a_checkpoint_that_is_not_whole(tmp_path):
    write(tmp_path / "checkpoint-5", state(5))
    torn = write(tmp_path / "checkpoint-10", state(10)[:200])
    (log,) = read_logs(FORMAT, tmp_path, everything)
    assert log.metrics["reward"].step_N[-1] == 5
    assert len(log.notes) == 1
    assert log.notes[0].startswith(f"{torn}: not JSON")
    with pytest.raises(InputError, match=r"checkpoint-10.*not JSON"):
        read_logs(FORMAT, tmp_path / "checkpoint-10", everything)
    shutil.rmtree(tmp_path / "checkpoint-5")
    with pytest.raises(InputError, match=r"checkpoint-10.*not JSON"):
        read_logs(FORMAT, tmp_path, everything)


def test_a_file_that_is_cut_off_is_told_so(tmp_path):
    text = state(10)
    for end in (text.index('"step"') + 3, text.rindex(",")):
        path = write(tmp_path, text[:end])
        with pytest.raises(InputError, match=r"line|column") as error:
            FORMAT.read(path, everything)
        told = str(error.value)
        assert told.endswith(
            "; the file is cut off (a crash while writing): read that of an earlier checkpoint"
        )
        assert "at at" not in told
    with pytest.raises(InputError) as error:
        FORMAT.read(write(tmp_path, text.replace("10", "1O", 1)), everything)
    assert "cut off" not in str(error.value)


def test_metrics_of_several_evaluation_sets_are_told_apart_by_their_rows(tmp_path):
    # TRL logs all sets under the same names, beside what the Trainer names after the set.
    rows = []
    for step in range(0, 80, 10):
        rows += [{"step": step, "reward": 0.5, "completions/mean_length": 100.0}] if step else []
        for name, share in (("math", 0.6), ("gsm8k_hard", 0.3)):
            row = {"eval_reward": share + 0.2, "eval_rewards/accuracy_reward/mean": share + step / 1000}
            rows.append({"step": step, f"eval_{name}_loss": 0.0, f"eval_{name}_runtime": 9.0, **row})
    path = write(tmp_path, state(70, rows))
    run = load_run(path, metric="eval_math_rewards/accuracy_reward/mean")
    assert run.metric.dataset == "math"
    assert [point.pass_rate for point in run.evals] == pytest.approx([0.6 + n / 100 for n in range(8)])
    unasked = load_run(path)
    assert unasked.metric.name == "eval_gsm8k_hard_rewards/accuracy_reward/mean"
    assert any("takes another of eval_math_rewards/accuracy_reward/mean" in one for one in unasked.warnings)
    assert len(unasked.evals) == 8
    assert "left_out" not in unasked.config
    assert "eval_reward" not in read_logs(FORMAT, path, everything)[0].names
    # A number that is no set's, and one of a single set, keep their names.
    rows = [{"step": n, "eval_math_runtime": 9.0, "eval_reward": 0.5} for n in range(3)]
    assert list(read_logs(FORMAT, write(tmp_path / "one", state(3, rows)), everything)[0].metrics) == [
        "eval_math_runtime",
        "eval_reward",
    ]


def test_several_runs(tmp_path):
    write(tmp_path / "a" / "checkpoint-1", state(1))
    write(tmp_path / "b", state(2))
    (tmp_path / "c").mkdir()
    assert FORMAT.recognises(tmp_path)
    assert [log.name for log in read_logs(FORMAT, tmp_path, everything)] == ["a", "b"]


def test_the_model_and_its_adapter(tmp_path):
    path = write(tmp_path / "checkpoint-1", state(1, num_train_epochs=3, max_steps=9, total_flos=1e9))
    write(path.parent, '{"_name_or_path": "Qwen/Qwen3-4B", "model_type": "qwen3", "x": 1}', "config.json")
    write(path.parent, '{"base_model_name_or_path": "Qwen/Q", "r": 8}', "adapter_config.json")
    write(path.parent, b"\x80\x04cos\nsystem\n(S'false'\ntR.", "training_args.bin")
    (log,) = read_logs(FORMAT, tmp_path, everything)
    expected = {"global_step": 1, "max_steps": 9, "num_train_epochs": 3, "total_flos": 1e9}
    assert log.config == expected | {
        "_name_or_path": "Qwen/Qwen3-4B",
        "model_type": "qwen3",
        "base_model_name_or_path": "Qwen/Q",
    }
    write(path.parent, "[", "config.json")
    assert "_name_or_path" not in read_logs(FORMAT, tmp_path, everything)[0].config


def test_steps_that_come_twice_and_values_that_are_none(tmp_path):
    rows = [
        {"step": 1, "loss": 1.0, "reward": None, "text": "x"},
        {"step": 1, "eval_reward": 0.5},
        {"step": 2, "loss": math.nan, "completions": [1]},
        {"step": 2, "loss": 2},
    ]
    (log,) = read_logs(FORMAT, write(tmp_path, state(2, rows)), everything)
    assert log.metrics["loss"].value_N.tolist() == [1, 2]
    assert log.metrics["eval_reward"].step_N.tolist() == [1]
    assert log.names == ("loss", "eval_reward")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "expected one JSON object"),
        ("{}", "no 'log_history', a list of rows; expected a trainer_state.json"),
        ('{"log_history": {}}', "no 'log_history'"),
        ('{"log_history": [1]}', "row 1 of 'log_history' is 1, expected an object"),
        ('{"log_history": [{"step": 1}, {"loss": 1}]}', "row 2 of 'log_history' has the step None"),
        ('{"log_history": [{"step": true}]}', "row 1 of 'log_history' has the step True"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"\x00\x01", "not JSON"),
        ("[" * 100_000, "more than 100 levels of nesting"),
    ],
)
def test_errors(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as error:
        read_logs(FORMAT, path, everything)
    assert str(path) in str(error.value)


def test_what_is_recognised(tmp_path):
    assert FORMAT.recognises(write(tmp_path, "\ufeff" + state(1)))
    assert FORMAT.recognises(write(tmp_path, state(1), "renamed.json"))
    assert not FORMAT.recognises(write(tmp_path, '{"a": 1}', "config.json"))
    assert not FORMAT.recognises(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert not FORMAT.recognises(tmp_path / "empty")
    with pytest.raises(InputError, match=r"no trainer_state\.json in it"):
        read_logs(FORMAT, tmp_path / "empty", everything)
    write(tmp_path / "out", state(1))
    (tmp_path / "empty" / "checkpoint-1").symlink_to(tmp_path / "out")
    assert not FORMAT.recognises(tmp_path / "empty")


SOUND = state(3, max_steps=4).encode()


@settings(max_examples=300)
@given(data=damaged(SOUND))
def test_damaged_files(tmp_path, data):
    read_hostile(FORMAT, write(tmp_path, data))
