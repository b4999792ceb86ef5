import csv

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from read_logs import read_logs

from scalerl import InputError
from scalerl.ingest.formats.wandb_csv import FORMAT
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions

OF_CALLS = "the step is W&B's Step, which counts calls of log where the trainer gives no step, as of TRL"


def everything(name):
    return True


def write(tmp_path, rows, encoding="utf-8", name="wandb_export_2026-01-01T00_00_00.000+00_00.csv"):
    """As the page does: every cell in quotes, empty ones too."""
    path = tmp_path / name
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def header(x, *names):
    return [x, *(f"{name}{end}" for name in names for end in ("", "__MIN", "__MAX"))]


def thrice(*cells):
    return [cell for cell in cells for _ in range(3)]


def read(path, wanted=everything):
    return {log.name: log for log in read_logs(FORMAT, path, wanted)}


def values(log, name):
    return dict(zip(log.metrics[name].step_N.tolist(), log.metrics[name].value_N.tolist(), strict=True))


def test_runs_side_by_side(tmp_path):
    names = ("grpo - seed 1 - val/acc", "ppo, lr=1e-6 - val/acc")
    rows = [
        header("Step", *names),
        ["0", *thrice(".5", "")],
        ["10", *thrice("", "0.25")],
        ["20", *thrice("1", "1e-3")],
    ]
    path = write(tmp_path, rows)
    assert FORMAT.recognises(path)
    logs = read(path)
    assert list(logs) == ["grpo - seed 1", "ppo, lr=1e-6"]
    assert values(logs["grpo - seed 1"], "val/acc") == {0: 0.5, 20: 1}
    assert values(logs["ppo, lr=1e-6"], "val/acc") == {10: 0.25, 20: 0.001}
    for log in logs.values():
        assert (log.format, log.source, log.names) == ("wandb-csv", str(path), ("val/acc",))
        assert log.notes == (OF_CALLS,)
        assert np.isnan(log.metrics["val/acc"].time_N).all()


@pytest.mark.parametrize(
    "x", ["Step", "train/global_step", "trainer/global_step", "step", "_step", "training iteration"]
)
def test_axes_that_are_steps(tmp_path, x):
    log = read(write(tmp_path, [header(x, "run - loss"), ["3", *thrice("2")]]))["run"]
    assert values(log, "loss") == {3: 2}
    assert log.notes == (OF_CALLS if x == "Step" else f"the step is {x}",)


@pytest.mark.parametrize(
    ("x", "what"),
    [
        ("Relative Time (Process)", "a time"),
        ("Relative Time (Wall)", "a time"),
        ("Wall Time", "a time"),
        ("_timestamp", "a time"),
        ("_runtime", "a time"),
        ("train/epoch", "no step of a trainer"),
        ("train/num_tokens", "no step of a trainer"),
        ("env_step", "no step of a trainer"),
        ("timesteps", "no step of a trainer"),
    ],
)
def test_axes_that_are_none(tmp_path, x, what):
    path = write(tmp_path, [header(x, "run - loss"), ["3", *thrice("2")]])
    assert FORMAT.recognises(path)
    with pytest.raises(InputError) as raised:
        read_logs(FORMAT, path, everything)
    assert str(raised.value).startswith(
        f"{path}: the x axis is '{x}', {what}; expected a chart exported with 'Step', or"
    )
    assert (f"scalerl fit - --x '{x}' --y COLUMN < FILE" in str(raised.value)) == (what != "a time")


def test_the_step_beside_another_axis(tmp_path):
    rows = [
        header("_timestamp", "run - _step", "run - loss"),
        ["1.7e9", *thrice("5", "2")],
        ["1700000010", *thrice("7", "1")],
    ]
    log = read(write(tmp_path, rows))["run"]
    assert values(log, "loss") == {5: 2, 7: 1}
    assert list(log.metrics["loss"].time_N) == [1.7e9, 1.7e9 + 10]
    assert log.notes == ("the step is that of the columns 'RUN - _step'",)
    rows[0] = header("Relative Time (Process)", "run - _step", "run - loss")
    rows[1][0], rows[2][0] = "1.5", "11.5"
    log = read(write(tmp_path, rows))["run"]
    assert values(log, "loss") == {5: 2, 7: 1}
    assert np.isnan(log.metrics["loss"].time_N).all()


def test_times_of_a_run(tmp_path):
    rows = [header("Step", "run - loss", "run - _timestamp"), ["1", *thrice("5", "1.7e9")]]
    log = read(write(tmp_path, rows))["run"]
    assert list(log.metrics) == ["loss"]
    assert list(log.metrics["loss"].time_N) == [1.7e9]


def test_byte_order_mark_line_ends_and_no_quotes(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(
        "\ufeffStep,r – é - acc,r – é - acc__MIN,r – é - acc__MAX\r\n1,.5,.5,.5\r\n\r\n2,.6\r\n".encode()
    )
    assert FORMAT.recognises(path)
    assert values(read(path)["r – é"], "acc") == {1: 0.5, 2: 0.6}


def test_where_the_metric_has_the_separator(tmp_path):
    rows = [header("Step", "my - run - Loss - train"), ["1", *thrice("2")]]
    assert {name: log.names for name, log in read(write(tmp_path, rows)).items()} == {
        "my - run - Loss": ("train",)
    }
    logs = read(write(tmp_path, rows), lambda name: name == "Loss - train")
    assert values(logs["my - run"], "Loss - train") == {1: 2}


def test_two_runs_of_one_name(tmp_path):
    rows = [header("Step", "run - acc", "run - loss", "run - acc"), ["1", *thrice(".1", ".2", ".3")]]
    logs = read(write(tmp_path, rows))
    assert values(logs["run"], "acc") == {1: 0.1}
    assert values(logs["run"], "loss") == {1: 0.2}
    assert values(logs["run (2)"], "acc") == {1: 0.3}


def test_means_are_told(tmp_path):
    rows = [
        header("Step", "group: a - acc"),
        ["1", "0.5", "0.4", "0.6"],
        ["2", *thrice("0.7")],
        ["3", ".8", "", ""],
    ]
    log = read(write(tmp_path, rows))["group: a"]
    assert values(log, "acc") == {1: 0.5, 2: 0.7, 3: 0.8}
    assert log.notes == (OF_CALLS, "1 values are means of several that differ, as charts have them")


def test_a_metric_that_ends_as_a_range_does(tmp_path):
    rows = [
        ["Step", "run - clip__MIN", "run - acc", "run - acc__MIN", "run - acc__MAX"],
        ["1", "3", "2", "2", "2"],
    ]
    assert set(read(write(tmp_path, rows))["run"].names) == {"clip__MIN", "acc"}


def test_cells_that_are_no_numbers(tmp_path):
    cells = ["NaN", "Infinity", "-Infinity", "text", "", "0.5"]
    rows = [header("Step", "run - acc"), *([str(n), *thrice(cell)] for n, cell in enumerate(cells))]
    path = write(tmp_path, rows)
    log = read(path)["run"]
    assert values(log, "acc") == {5: 0.5}
    assert log.notes == (OF_CALLS,)
    (run,) = read_source(path, ReadOptions("acc")).runs
    assert run.config["left_out"]["reasons"] == {"NaN": 1, "infinite": 2, "not a number": 1}


def test_rows_whose_run_has_no_step_are_named(tmp_path):
    rows = [["Relative Time (Wall)", "r - acc", "r - _step"]]
    rows += [[str(60 * n), "0.5", str(n) if n % 4 else ""] for n in range(1, 21)]
    (run,) = read_source(write(tmp_path, rows), ReadOptions("acc")).runs
    assert len(run.evals) == 15
    assert run.config["left_out"]["reasons"] == {"no step": 5}


def test_steps_that_are_no_whole_numbers(tmp_path):
    rows = [header("Step", "run - acc"), ["1.75", *thrice("1")], ["3.0", *thrice("2")]]
    log = read(write(tmp_path, rows))["run"]
    assert values(log, "acc") == {2: 1, 3: 2}
    assert log.notes == (OF_CALLS, "1 steps are no whole numbers and were rounded")


def test_only_what_is_wanted(tmp_path):
    rows = [header("Step", "run - acc", "run - loss"), ["1", *thrice("1", "2")]]
    log = read(write(tmp_path, rows), lambda name: name == "loss")["run"]
    assert list(log.metrics) == ["loss"]
    assert log.names == ("acc", "loss")


REWARD = "eval/rewards/accuracy_reward/mean"


def of_two_sets(tmp_path, x, names, *columns):
    """A chart of TRL, which evaluates gsm8k, then math; `columns` says which of them each metric is of."""
    calls = range(24)
    steps = [10 * (call // 2) + (call % 2 if x == "Step" else 0) for call in calls]
    rates = [0.1 + call / 100 + 0.3 * (call % 2 == 0) for call in calls]
    cells = [[rates[call] if call % 2 in filled else "" for call in calls] for filled in columns]
    names = [f"grpo - {name}" for name in names]
    rows = ([step, *thrice(*row)] for step, row in zip(steps, zip(*cells, strict=True), strict=True))
    return write(tmp_path, [header(x, *names), *rows])


@pytest.mark.parametrize("x", ["Step", "train/global_step"])
def test_sets_in_columns_of_their_own_are_fitted_each(tmp_path, x):
    """Without another metric in the chart, their names alone show that the trainer is TRL."""
    names = [REWARD.replace("eval/", f"eval/{name}_") for name in ("gsm8k", "math")]
    chart = of_two_sets(tmp_path, x, names, [0], [1])
    runs = read_source(chart, ReadOptions(each=True)).runs
    assert [run.metric.dataset for run in runs] == ["gsm8k", "math"]
    assert [run.evals[-1].pass_rate for run in runs] == pytest.approx([0.62, 0.33])
    (named,) = read_source(chart, ReadOptions(metric=names[1])).runs
    assert (named.metric.dataset, len(named.evals)) == ("math", 12)


@pytest.mark.parametrize("x", ["Step", "train/global_step"])
@pytest.mark.parametrize("asked", [ReadOptions(), ReadOptions(metric=REWARD), ReadOptions(each=True)])
def test_sets_in_one_column_are_told_apart_by_their_seconds_or_refused(tmp_path, x, asked):
    with pytest.raises(
        InputError, match=r"has several values at each evaluation, .* add eval/SET_runtime of"
    ):
        read_source(of_two_sets(tmp_path, x, [REWARD], [0, 1]), asked)
    names = [REWARD, "eval/gsm8k_runtime", "eval/math_runtime"]
    chart = of_two_sets(tmp_path, x, names, [0, 1], [0], [1])
    runs = read_source(chart, ReadOptions(each=True)).runs
    assert [run.evals[-1].pass_rate for run in runs] == pytest.approx([0.62, 0.33])


@pytest.mark.parametrize("every", [1, 3, 100])
def test_evaluations_of_one_set_are_one_curve_even_where_steps_are_missing_at_regular_places(tmp_path, every):
    """As where a call in three logs the training alone."""
    steps = [n for n in range(30) if every == 1 or n % every]
    rows = [header("Step", f"grpo - {REWARD}"), *([n, *thrice(n / 100)] for n in steps)]
    (run,) = read_source(write(tmp_path, rows)).runs
    assert len(run.evals) == len(steps)


def test_a_chart_without_a_known_metric_says_so_for_each(tmp_path):
    chart = write(tmp_path, [header("Step", "r - loss"), *([n, *thrice(1.5)] for n in range(20))])
    with pytest.raises(
        InputError, match=r"no metric here is a known pass rate or reward; --y takes one of: loss"
    ):
        read_source(chart, ReadOptions(each=True))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the file is empty; expected a chart"),
        ("\n\n", "the file is empty; expected a chart"),
        ("Step,loss\n1,2\n", "no column is called 'RUN - METRIC'; expected a chart"),
        ('"Step","r - a"\n"","2"\n', "line 2: expected a step in 'Step', found ''"),
        ('"Step","r - a"\n"1","2"\n"nan","2"\n', "line 3: expected a step in 'Step', found 'nan'"),
        ('"Step","r - a"\n"-1","2"\n', "line 2: expected a step in 'Step', found '-1'"),
        ('"Step","r - a"\n"1e400","2"\n', "line 2: expected a step in 'Step', found '1e400'"),
        ('"Step","r - a"\n"1_0","2"\n', "line 2: expected a step in 'Step', found '1_0'"),
        ('"Step","r - a"\n1,2,3\n', "line 2: 3 cells for 2 columns"),
        (b'"Step","r - a"\n1,\xff\n', "not a text in UTF-8"),
        ('"Step","r - a"\n1,2\n'.encode("utf-16"), "UTF-16"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, why):
    path = tmp_path / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as raised:
        read_logs(FORMAT, path, everything)
    assert str(raised.value).startswith(str(path))
    assert why in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"step,pass_rate\n1,2\n",
        b"Step,loss - train,loss\n1,2,3\n",
        b"a - b,c - d\n1,2\n",
        b"name,a - b\nx,2\n",
        b'{"Step": 1}\n',
        b"\xff\xfe\x00",
        b'"Step","r - a',
        b"PK\x03\x04",
    ],
)
def test_what_is_not_recognised(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_bytes(text)
    assert not FORMAT.recognises(path) or text == b'"Step","r - a'
    assert not FORMAT.recognises(tmp_path)
    assert not FORMAT.recognises(tmp_path / "nothing")


@settings(max_examples=150)
@given(st.binary(max_size=200), st.sampled_from([b"", b'"Step","r - a","r - a__MIN","r - a__MAX"\n']))
@example(b'"1\n', b"Step,r - a\n")
def test_any_bytes_are_read_or_refused(tmp_path, data, start):
    path = tmp_path / "x.csv"
    path.write_bytes(start + data)
    FORMAT.recognises(path)
    try:
        logs = read_logs(FORMAT, path, everything)
    except InputError as error:
        refused = str(error)
    else:
        refused = str(path)
        assert all(np.isfinite(series.value_N).all() for log in logs for series in log.metrics.values())
    assert refused.startswith(str(path))
