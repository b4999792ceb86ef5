import json
import math

import numpy as np
import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings, strategies as st
from read_logs import read_logs

from scalerl import InputError, load_run
from scalerl.ingest.formats.metrics_jsonl import FORMAT
from scalerl.ingest.formats.rows import unix_seconds

# As the file monitor of prime-rl writes it, {"step": .., "time": .., **metrics}: a line per part of a step.
TRAINER = [
    {"step": 1, "time": 1.7e9, "perf/throughput": 900.0, "perf/mfu": 12.0},
    {"step": 1, "time": 1.7e9, "loss/mean": 0.1, "entropy/all/mean": 0.5},
    {"step": 1, "time": 1.7e9, "time/step": 10.0, "time/wait_for_batch": 1.0},
    {"step": 2, "time": 1.7e9 + 10, "loss/mean": 0.2, "time/step": 11.0, "time/wait_for_batch": 1.0},
]
ORCHESTRATOR = [
    {"step": 1, "time": 1.7e9 - 5, "reward/all/mean": 0.25, "time/step": 4.0, "time/pack": 0.5},
    {"step": 2, "time": 1.7e9 - 1, "reward/all/mean": 0.5, "time/step": 5.0, "time/pack": 0.5},
    {"step": 2, "time": 1.7e9, "eval/aime/avg@16": 0.125},
    {"step": 3, "time": 1.7e9 + 4, "reward/all/mean": 0.75, "time/step": 6.0, "time/pack": 0.5},
]


def dumped(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder, text, name="metrics.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def check_both(log):
    assert log.metrics["loss/mean"].value_N.tolist() == [0.1, 0.2]
    assert log.metrics["reward/all/mean"].step_N.tolist() == [1, 2, 3]
    assert log.metrics["reward/all/mean"].time_N.tolist() == [1.7e9 - 5, 1.7e9 - 1, 1.7e9 + 4]
    assert log.metrics["eval/aime/avg@16"].value_N.tolist() == [0.125]
    assert log.metrics["time/step"].value_N.tolist() == [10, 11]
    assert log.metrics["orchestrator/time/step"].value_N.tolist() == [4, 5, 6]
    assert log.metrics["time/pack"].value_N.tolist() == [0.5, 0.5, 0.5]
    assert log.notes == (
        "trainer and orchestrator both log time/step: the orchestrator's are orchestrator/*",
    )
    assert not {"step", "time"} & set(log.names)


def test_prime_rl_in_a_file_each(tmp_path):
    write(tmp_path / "run" / "trainer", dumped(TRAINER))
    write(tmp_path / "run" / "orchestrator", dumped(ORCHESTRATOR))
    for path in (tmp_path, tmp_path / "run"):
        assert FORMAT.recognises(path)
        (log,) = read_logs(FORMAT, path, everything)
        assert log.name == "run"
        check_both(log)


def test_prime_rl_in_one_file(tmp_path):
    rows = [*ORCHESTRATOR[:2], *TRAINER[:3], ORCHESTRATOR[3], *ORCHESTRATOR[2:3], TRAINER[3]]
    path = write(tmp_path / "run", dumped(rows))
    assert FORMAT.recognises(path)
    check_both(read_logs(FORMAT, path, everything)[0])
    (log,) = read_logs(FORMAT, tmp_path / "run", everything)
    assert log.name == "run"
    check_both(log)


def test_the_orchestrator_alone_keeps_its_names(tmp_path):
    (log,) = read_logs(FORMAT, write(tmp_path, dumped(ORCHESTRATOR)), lambda name: name == "time/step")
    assert list(log.metrics) == ["time/step"]
    assert log.metrics["time/step"].value_N.tolist() == [4, 5, 6]
    assert "reward/all/mean" in log.names
    assert log.notes == ()


@pytest.mark.parametrize("numbers", [5, 0])
def test_evaluations_of_the_orchestrator_without_a_number_are_named(tmp_path, numbers):
    """Their names are those of its metrics, without the process's."""
    rows = [
        {
            "step": n,
            "reward/mean": 0.4,
            "time/pack": 0.5,
            "eval/aime/avg@4": 0.5 if n <= numbers else math.nan,
        }
        for n in range(1, 11)
    ]
    write(tmp_path / "run" / "trainer", dumped(TRAINER))
    write(tmp_path / "run" / "orchestrator", dumped(rows))
    (log,) = read_logs(FORMAT, tmp_path / "run", everything)
    assert log.omitted["eval/aime/avg@4"].step_V.tolist() == list(range(numbers + 1, 11))
    if numbers:
        run = load_run(tmp_path / "run")
        assert run.config["left_out"]["reasons"] == {"NaN": 5}
        assert "the last 5 of 10 evaluations of 'eval/aime/avg@4' (50 %) are NaN" in run.warnings[0]
    else:
        with pytest.raises(InputError, match="10 evaluations of 'eval/aime/avg@4' left out, NaN"):
            load_run(tmp_path / "run")


def test_a_folder_of_runs(tmp_path):
    write(tmp_path / "b", dumped(TRAINER))
    write(tmp_path / "a" / "trainer", dumped(TRAINER))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert [log.name for log in read_logs(FORMAT, tmp_path, everything)] == ["a", "b"]
    with pytest.raises(InputError, match=r"no metrics\.jsonl in it"):
        read_logs(FORMAT, tmp_path / "empty", everything)


@pytest.mark.parametrize(
    "key", ["step", "global_step", "_step", "train/global_step", "training_step", "iteration"]
)
@pytest.mark.parametrize("time", ["time", "_timestamp", "timestamp", "wall_time"])
def test_names_of_steps_and_times(tmp_path, key, time):
    path = write(tmp_path, dumped([{key: n, time: 1.7e9 + n, "loss": 0.5 * n} for n in range(4)]), "x.jsonl")
    assert FORMAT.recognises(path)
    (log,) = read_logs(FORMAT, path, everything)
    assert log.name == "x"
    assert log.names == ("loss",)
    assert log.metrics["loss"].step_N.tolist() == [0, 1, 2, 3]
    assert log.metrics["loss"].time_N.tolist() == [1.7e9 + n for n in range(4)]


def test_the_steps_of_open_instruct_are_not_its_completions(tmp_path):
    rows = [{"_step": n, "global_step": 512 * n, "training_step": n, "loss": 0.5} for n in range(4)]
    (log,) = read_logs(FORMAT, write(tmp_path, dumped(rows), "x.jsonl"), everything)
    assert log.metrics["loss"].step_N.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("key", ["global_step/max_steps", "iteration"])
def test_steps_of_ms_swift(tmp_path, key):
    rows = []
    for n in range(1, 9):
        rows += [{"loss": 0.1, "reward": 0.5, "completions/mean_length": 9.0, key: f"{10 * n}/400"}]
        rows += [{"eval_rewards/MathAccuracy/mean": n / 10, "eval_reward": n / 5, key: f"{10 * n}/400"}]
    rows += [{"train_runtime": 99.0, "last_model_checkpoint": "out/checkpoint-80"}]
    path = write(tmp_path, dumped(rows), "logging.jsonl")
    assert FORMAT.recognises(path)
    run = load_run(path)
    assert run.metric.name == "eval_rewards/MathAccuracy/mean"
    assert [(point.step, point.pass_rate) for point in run.evals] == [(10 * n, n / 10) for n in range(1, 9)]
    assert any("1 row passed over, without a" in warning for warning in run.warnings)


def test_nested_rows(tmp_path):
    rows = [{"train": {"global_step": n, "loss": n}, "time": 1e9, "eval": {"a": {"b": 1}}} for n in (1, 2)]
    path = write(tmp_path, dumped(rows))
    assert FORMAT.recognises(path)
    (log,) = read_logs(FORMAT, path, everything)
    assert log.metrics["train/loss"].step_N.tolist() == [1, 2]
    assert set(log.names) == {"train/loss", "eval/a/b"}


def test_the_step_is_one_counter(tmp_path):
    rows = [{"note": "start"}, {"_step": 7, "train/global_step": 1, "a": 1}, {"_step": 8, "b": 1}]
    (log,) = read_logs(FORMAT, write(tmp_path, dumped(rows)), everything)
    assert log.metrics["a"].step_N.tolist() == [1]
    assert log.names == ("_step", "a")
    assert log.notes == ("2 rows passed over, without a 'train/global_step' (lines 1, 3)",)


@pytest.mark.parametrize("first", ["train", "eval"])
def test_one_count_under_two_names(tmp_path, first):
    rows = [{"_step": 0, "train/global_step": 1, "train/reward": 0.1}]
    rows += [{"_step": 1, "eval/global_step": 1, "eval/eval_a_pass1": 0.2}]
    rows += [{"_step": 2, "train/global_step": 2, "train/reward": 0.3}]
    (log,) = read_logs(FORMAT, write(tmp_path, dumped(rows if first == "train" else rows[1:])), everything)
    assert log.metrics["eval/eval_a_pass1"].step_N.tolist() == [1]
    assert log.metrics["train/reward"].step_N.tolist() == ([1, 2] if first == "train" else [2])
    assert log.notes == ()


def test_runs_by_a_column(tmp_path):
    rows = [
        {"step": n, "run_id": f"id{run}", "run_name": "same", "a": run} for n in range(3) for run in range(2)
    ]
    logs = read_logs(FORMAT, write(tmp_path, dumped(rows)), everything)
    assert [log.metrics["a"].value_N.tolist() for log in logs] == [[0] * 3, [1] * 3]
    assert [log.name for log in logs] == ["same", "same"]


def test_a_column_of_runs_in_the_words_of_a_table(tmp_path):
    rows = [{"run": run, "step": step, "eval/acc": 0.1} for run in "ab" for step in (1, 2)]
    assert [log.name for log in read_logs(FORMAT, write(tmp_path, dumped(rows)), everything)] == ["a", "b"]


@pytest.mark.parametrize(("column", "values"), [("dataset", ["aime", "math"]), ("seed", [0, 1])])
def test_rows_of_several_data_sets_or_seeds_are_reported(tmp_path, column, values):
    made = [{"step": step, "eval/acc": step / 9, column: one} for step in range(8) for one in values]
    rows = [*made, {"step": 8, "kl": 0.1, column: values[0]}, {"step": 9, "eval/acc": 0.9}]
    run = load_run(write(tmp_path / "both", dumped(rows)))
    said = f"rows of 'eval/acc' of {column} {values[0]}, {column} {values[1]} count as evaluations of one run"
    assert any(text.startswith(said) for text in run.warnings)
    # One after the other, as where the data set was changed, and one alone are one series.
    for rest in (sorted(made, key=lambda row: str(row[column])), made[::2]):
        one_by_one = [{**row, "step": step} for step, row in enumerate(rest)]
        run = load_run(write(tmp_path / f"{len(rest)}", dumped(one_by_one)))
        assert not any("rows of 'eval/acc'" in text for text in run.warnings)


def test_a_metric_a_row(tmp_path):
    """As `pandas.melt` writes it: "value" alone would be one curve of all metrics."""
    named = {"eval/acc": 0.5, "train/reward": 0.1}
    made = [{"step": s, "metric": m, "value": v + s / 99} for m, v in named.items() for s in range(8)]
    (log,) = read_logs(FORMAT, write(tmp_path / "melted", dumped(made)), everything)
    assert set(log.metrics) == set(named)
    assert log.metrics["eval/acc"].value_N.tolist() == [0.5 + s / 99 for s in range(8)]
    run = load_run(tmp_path / "melted")
    assert run.config["metric"]["name"] == "eval/acc"
    assert len(run.evals) == 8


def test_small_times_are_no_times_of_day(tmp_path):
    (log,) = read_logs(FORMAT, write(tmp_path, dumped([{"step": 1, "time": 3.5, "a": 1}])), everything)
    assert log.metrics["time"].value_N.tolist() == [3.5]
    assert np.isnan(log.metrics["a"].time_N).all()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.7e9, 1.7e9),
        (1_700_000_000_123, 1.700000000123e9),
        (1_700_000_000_123_456_789, 1.7000000001234567e9),
        ("2023-11-14T22:13:20+00:00", 1.7e9),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14 22:13:20", 1.7e9),
        ("2023-11-15T00:13:20.5+02:00", 1.7e9 + 0.5),
        ("yesterday", math.nan),
        ("", math.nan),
        (None, math.nan),
        (True, math.nan),
        (12.5, math.nan),
        (-1.7e9, math.nan),
        (1e300, math.nan),
        (math.inf, math.nan),
        (10**400, math.nan),
        ([1.7e9], math.nan),
    ],
)
def test_unix_seconds(value, expected):
    assert unix_seconds(value) == pytest.approx(expected, rel=1e-15, nan_ok=True)


@given(
    st.one_of(
        st.text(max_size=40), st.datetimes(timezones=st.timezones()).map(str), st.floats(), st.integers()
    )
)
def test_no_time_is_an_error(value):
    assert isinstance(unix_seconds(value), float)


@pytest.mark.parametrize(
    "row",
    [
        {"pass_rate": 0.5, "gpu_hours": 1, "step": 2},
        {"pass_rate": 0.5, "flops": {"generate": 1.0}, "step": 2, "time": 1.7e9},
        {"pass_rate": 0.5, "device_seconds": {"train": 1}, "tokens": {"train": 1}, "step": 2},
        {"pass_rate": 0.5, "step": 2},
        {"step": 2, "data": {"actor/entropy": 1}},
        {"loss": 0.5},
        {"step": "2"},
        {"step": True},
        {"step": None},
    ],
)
def test_what_is_left_to_others(tmp_path, row):
    assert not FORMAT.recognises(write(tmp_path, dumped([row] * 3)))


def test_what_is_recognised(tmp_path):
    assert FORMAT.recognises(write(tmp_path, dumped([{"pass_rate": 0.5, "step": 2, "time": 1.7e9}])))
    assert FORMAT.recognises(write(tmp_path, "\ufeff\n\n" + dumped(TRAINER)))
    assert FORMAT.recognises(write(tmp_path, '{"step": 1, "a": 2}'))
    for text in ("step,time\n1,2\n", '[{"step": 1}]', "{", "", dumped(TRAINER).encode("utf-16")):
        assert not FORMAT.recognises(write(tmp_path, text))
    assert not FORMAT.recognises(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (dumped(TRAINER) + "oops\n" + dumped(TRAINER), "line 5: not JSON"),
        (dumped(TRAINER) + "[]\n", "line 5: expected one JSON object"),
        (b'{"step": 1}\n{"a": "\xff"}\n', "line 2: not JSON"),
        (b'{"step": 1}\n\0\n', "line 2: a binary file"),
        (dumped(TRAINER).encode("utf-16"), "UTF-16"),
        ('{"a": 1}\n', "no row has a step, a number called step, training_step"),
        ("", "no row has a step"),
        ("[" * 100_000 + "\n", "line 1: more than 100 levels of nesting"),
        ('{"step": ' + "1" * 5000 + "}\n", "line 1: not JSON"),
    ],
)
def test_errors(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as error:
        read_logs(FORMAT, path, everything)
    assert str(path) in str(error.value)


def test_an_unfinished_end(tmp_path):
    path = write(tmp_path, dumped(TRAINER)[:-20])
    (log,) = read_logs(FORMAT, path, everything)
    assert log.metrics["loss/mean"].step_N.tolist() == [1]
    assert log.notes == (f"{path}: the last line is unfinished (a crash while writing); left out",)
    (log,) = read_logs(FORMAT, write(tmp_path, dumped(TRAINER)[:-1]), everything)
    assert log.notes == ()


def test_what_is_not_wanted_takes_no_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(8_000):
            file.write(json.dumps({"step": step, "kept": step, **{f"m{n}": 0.5 for n in range(20)}}) + "\n")
    import tracemalloc

    tracemalloc.start()
    (log,) = read_logs(FORMAT, path, lambda name: name == "kept")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(log.metrics["kept"]) == 8_000
    assert len(log.names) == 21
    assert peak < 2.4e6  # of 1.8 MB of rows 3 columns of 8,000 numbers are kept


SOUND = dumped(
    [*ORCHESTRATOR[:2], *TRAINER[:2], {"step": 3, "timestamp": "2023-11-14T22:13:20Z", "a": {"b": 1}}]
)


@settings(max_examples=300)
@given(data=damaged(SOUND.encode()))
def test_damaged_files(tmp_path, data):
    read_hostile(FORMAT, write(tmp_path, data))
