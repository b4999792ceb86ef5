import json
import math
import os
import threading

import numpy as np
import pytest

from scalerl import CannotAnswerError, InputError
from scalerl.curve import Points, fit
from scalerl.ingest import read_table


def write(tmp_path, text, name="log.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_long_texts_beside_the_numbers(tmp_path):
    text = "x" * 200_000
    path = write(tmp_path, f"gpu_hours,pass_rate,sample\n0,.2,{text}\n2.5,.3,{text}\n")
    assert read_table(path).compute_N.tolist() == [0, 2.5]


def test_csv_with_noise_and_steps(tmp_path):
    path = write(
        tmp_path,
        "gpu_hours,step,pass_rate,n_prompts,n_samples,mean_p_1mp\n0,0,.2,100,16,.16\n2.5,100,.3,100,16,.04\n",
    )
    points = read_table(path)
    np.testing.assert_allclose(points.compute_N, [0, 2.5])
    np.testing.assert_allclose(points.pass_rate_N, [0.2, 0.3])
    np.testing.assert_allclose(points.noise_sd_N, [0.01, 0.005])
    assert points.step_N is not None
    np.testing.assert_allclose(points.step_N, [0, 100])
    assert points.axis == "gpu_hours"
    np.testing.assert_allclose(points.samples_N, [1600, 1600])
    assert points.warnings == ()


def test_samples_are_known_where_the_noise_is_not(tmp_path):
    points = read_table(write(tmp_path, "gpu_hours,pass_rate,n_prompts,n_samples\n0,.2,100,4\n1,.3,0,4\n"))
    np.testing.assert_allclose(points.samples_N, [400, np.nan])
    assert np.isnan(points.noise_sd_N).all()


def test_one_sample_per_prompt_says_nothing_of_the_noise(tmp_path):
    text = "gpu_hours,pass_rate,n_prompts,n_samples,mean_p_1mp\n0,.2,100,1,0\n1,.3,100,4,.16\n"
    points = read_table(write(tmp_path, text))
    np.testing.assert_allclose(points.samples_N, [100, 400])
    np.testing.assert_allclose(points.noise_sd_N, [np.nan, 0.02])  # sqrt(.16 / 400)
    assert [w.split(": ")[-1] for w in points.warnings] == [
        "the evaluation noise is unknown at one sample per prompt"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "c;acc\n1;.5\n2;.6\n",
        "c\tacc\n1\t.5\n2\t.6\n",
        "\ufeffc, acc\r\n1,.5\r\n2,.6",
        '\n\n"c",acc\n"1",.5\n\n2,.6\n\n',
        "c,acc\r1,.5\r2,.6",
    ],
)
def test_dialects_and_any_column(tmp_path, text):
    points = read_table(write(tmp_path, text), x="c", y="acc")
    np.testing.assert_allclose(points.pass_rate_N, [0.5, 0.6])
    assert np.isnan(points.noise_sd_N).all()


def test_rows_without_an_evaluation_are_passed_over_with_a_warning(tmp_path):
    points = read_table(write(tmp_path, "gpu_hours,pass_rate\n1,.5\n2,\n3,.6\n"))
    np.testing.assert_allclose(points.compute_N, [1, 3])
    assert "1 row left out, without a 'pass_rate'" in points.warnings[0]


def test_rows_that_are_there_twice_are_kept_with_a_warning(tmp_path):
    points = read_table(write(tmp_path, "gpu_hours,pass_rate\n1,.5\n2,.6\n2,.6\n2,.61\n3,.6\n"))
    np.testing.assert_allclose(points.compute_N, [1, 2, 2, 2, 3])
    assert [w.split("log.csv: ")[1][:58] for w in points.warnings] == [
        "1 evaluation has the compute and the pass rate of another;"
    ]


def test_dollars_from_gpu_hours(tmp_path):
    path = write(tmp_path, "gpu_hours,pass_rate\n1,.5\n2,.6\n")
    np.testing.assert_allclose(read_table(path, x="dollars", price=3.0).compute_N, [3, 6])
    with pytest.raises(InputError, match="price"):
        read_table(path, x="dollars")
    for price in (0.0, -1.0, np.nan):
        with pytest.raises(InputError, match="dollars above 0"):
            read_table(path, x="dollars", price=price)
    with pytest.raises(InputError, match="line 2: dollars inf is not a finite number"):
        read_table(write(tmp_path, "gpu_hours,pass_rate\n1e300,.5\n"), x="dollars", price=1e300)


def test_jsonl_and_its_unfinished_last_line(tmp_path):
    whole = "".join(json.dumps({"gpu_hours": c, "pass_rate": 0.1 * c}) + "\n" for c in range(4))
    points = read_table(write(tmp_path, whole + '{"gpu_hours": 4, "pass_', "log.jsonl"))
    assert len(points) == 4
    assert "unfinished" in points.warnings[0]
    # A whole last line that only lacks its newline is kept.
    assert len(read_table(write(tmp_path, whole.rstrip("\n"), "whole.jsonl"))) == 4


def test_evals_jsonl_alone_builds_its_axes(tmp_path):
    rows = [
        {
            "step": 100 * i,
            "pass_rate": 0.2 + 0.1 * i,
            "device_seconds": {"generate": 3600.0 * i, "train": 1800.0 * i, "evaluate": 5.0, "idle": 0.0},
            "tokens": {"generated": 7.0 * i, "trained": 3.0 * i},
        }
        for i in range(3)
    ]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "evals.jsonl")
    np.testing.assert_allclose(read_table(path).compute_N, [0, 1.5, 3.0])
    np.testing.assert_allclose(read_table(path, x="tokens").compute_N, [0, 7, 14])
    np.testing.assert_allclose(read_table(path, x="tokens_processed").compute_N, [0, 10, 20])
    with pytest.raises(InputError, match="counters behind the axis 'flops'"):
        read_table(path, x="flops")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\x1c", "the file is empty"),  # white space of a text, and none of bytes
        (
            "gpuhours,pass_rate\n1,.5\n",
            "no column 'gpu_hours'; did you mean 'gpuhours'\\? columns: gpuhours, pass",
        ),
        ("gpu_hours,reward\n1,.5\n", "no column 'pass_rate'; columns: gpu_hours, reward"),
        (
            "gpu_hours,pass_rate\n1,.5\n2,good\n",
            "line 3, column 'pass_rate': expected a finite number.*'good'",
        ),
        ("gpu_hours,pass_rate\n1,nan\n2,nan\n", "line 2, column 'pass_rate': expected a finite number"),
        ("gpu_hours,pass_rate\n,.5\n", "line 2, column 'gpu_hours': empty"),
        (
            "gpu_hours,pass_rate\n1,.5\n\n2,61\n",
            "line 4: pass rate 61 is above 1: looks like percent: add --percent",
        ),
        ("gpu_hours,pass_rate\n1,-.5\n", "line 2: pass rate -0.5 is below 0"),
        ("gpu_hours,pass_rate\n-1,.5\n", "line 2: gpu_hours -1 is negative"),
        ("gpu_hours,pass_rate\n1,.5,9\n", "line 2: 3 cells for 2 columns"),
        ("", "the file is empty"),
        ("  \n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "not a text file"),
        (b"abc\x00def\n", "binary"),
        ('{"gpu_hours": 1, "pass_rate": .5}\n{"gpu_hours": 2\n{"a": 1}\n', "line 1: not JSON"),
        ('{"gpu_hours": 1, "pass_rate": "x"}\n', "line 1, column 'pass_rate'.*'x'"),
        ('{"gpu_hours": true, "pass_rate": 0.5}\n', "line 1, column 'gpu_hours'.*True"),
        ('{"gpu_hours": [1], "pass_rate": 0.5}\n', r"line 1, column 'gpu_hours'.*\[1\]"),
        ('{"gpu_hours": 1, "pass_rate": NaN}\n', "line 1, column 'pass_rate'.*nan"),
        (f'{{"gpu_hours": {10**400}, "pass_rate": 0.5}}\n', r"line 1, column 'gpu_hours'.*1000\S+\.\.\.00"),
        ('[{"gpu_hours": 1, "pass_rate": 0.5}, {"gpu_hours": "x", "pass_rate": 1}]', "line 2, column 'gpu_"),
        ('[{"gpu_hours": 1, "pass_rate": 0.5}', "not JSON .expecting ',' delimiter at column 36"),
        (
            '[{"gpu_hours": 1, "pass_rate": 0.5}, 3]',
            "a JSON array without rows; expected an array of objects",
        ),
        ("[[1, 0.5], [2, 0.6]]", "a JSON array without rows; expected an array of objects"),
        ("gpu_hours,pass_rate\n1,.5\n".encode("utf-16"), "a text in UTF-16; expected UTF-8 .iconv"),
        ('gpu_hours,pass_rate\n"1,500",.5\n', "line 2, column 'gpu_hours'.*without separators, 1500, found"),
        ("gpu_hours,pass_rate\n1_000,.5\n", "line 2, column 'gpu_hours'.*without separators, 1000, found"),
        ("gpu_hours,pass_rate\n1,.1_0\n", "line 2, column 'pass_rate'.*a finite number, found"),
        # The metrics of a run in a public repository: the nearest by its letters is that of another thing.
        ("step,accuracy,format_rate\n1,.5,.9\n", "no column 'pass_rate'; did you mean 'accuracy'?"),
        (
            "step,format_rate,success_count_std\n1,.9,.1\n",
            "no column 'pass_rate'; columns: step, format_rate,",
        ),
        ("step,Pass-Rate\n1,.9\n", "no column 'pass_rate'; did you mean 'Pass-Rate'?"),
        (
            ",_step,pass_rate\n0,1,.5\n",
            "no column 'gpu_hours'; columns: , _step, pass_rate",
        ),  # an index of pandas
        (
            "step,train_acc,test_acc\n1,.5,.4\n",
            "no column 'pass_rate'; did you mean 'test_acc'?.*name the pass rate with --y$",
        ),
        ('{"gpu_hours": {"0": 1}, "pass_rate": {"0": 0.5}}\n', r"'pass_rate'.*orient='records', lines=True"),
        ("gpu_hours,pass_rate\n2026-01-02T03:04,.5\n", "finite number, such as the hours since the run st"),
        ("gpu_hours,pass_rate\n1,61.0%\n", "line 2, column 'pass_rate'.*not percent, 0.61, found '61.0%'"),
        (
            "gpu_hours,pass_rate\n1;.5,2;.6\n",
            "found '2;.6'; columns must be separated by commas, decimals by",
        ),
        ("gpu_hours;pass_rate\n1;0,61\n", "line 2, column 'pass_rate'.*decimal point, 0.61, found '0,61'"),
        ("gpu_hours,pass_rate,pass_rate\n1,.5,.6\n", "2 columns are named 'pass_rate'; rename all but one"),
        ("gpu_hours,step,pass_rate,step\n1,1,.5,2\n", "2 columns are named 'step'"),
        ("1,.5\n2,.6\n", "no column 'pass_rate'; the first line holds the names.*here it holds numbers"),
        ('"a\nb",pass_rate\n1,.5\n', r"no column 'gpu_hours'; columns: a\\nb, pass_rate"),
        (
            ",".join(f"c{i}" for i in range(500)) + "\n",
            "columns: c0, c1, .*, c19 and 480 more; name the pass rate with --y$",
        ),
        (
            "gpu_hours,accuracy\n1,.5\n",
            "no column 'pass_rate'; did you mean 'accuracy'?.*name the pass rate with --y$",
        ),
        (
            "hours,pass_rate\n1,.5\n",
            "no column 'gpu_hours'; did you mean 'hours'?.*name the compute with --x$",
        ),
        ('gpu_hours,pass_rate\n"1,.5\n', "line 2: unexpected end of data"),
        (
            "gpu_hours,pass_rate\n1," + "5" * 200_000 + "\n",
            "line 2, column 'pass_rate'.*expected a finite number",
        ),
        (
            "gpu_hours,pass_rate,n_prompts,n_samples\n1,.5,1e300,1e300\n",
            "line 2: number of samples inf must be",
        ),
    ],
)
def test_every_fault_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_table(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "option"), [({"x": "foo"}, "compute with --x"), ({"y": "foo"}, "rate with --y")]
)
def test_a_column_that_is_not_there_is_named_with_its_option(tmp_path, asked, option):
    with pytest.raises(InputError, match=f"no column 'foo'.*{option}$"):
        read_table(write(tmp_path, "gpu_hours,pass_rate\n1,.5\n"), **asked)


def test_dollars_have_a_column_of_hours_as_a_hint(tmp_path):
    with pytest.raises(InputError, match=r"no column 'dollars'.*--price needs a column 'gpu_hours'$"):
        read_table(write(tmp_path, "tokens,pass_rate\n1,.5\n"), x="dollars", price=2)


@pytest.mark.parametrize("unit", [1, 10**3, 10**9])
def test_a_time_of_day_is_no_compute(tmp_path, unit):
    clocks = [unit * (1_767_225_600 + 3600 * hour) for hour in range(3)]
    text = "timestamp,pass_rate\n" + "".join(f"{clock},.{n}\n" for n, clock in enumerate(clocks))
    with pytest.raises(InputError, match=r"line 2: timestamp \S+ is a time of day: expected what was spent"):
        read_table(write(tmp_path, text), x="timestamp")
    # Tokens of a run that begin late are an axis of this package, and what began at 0 is one of its own.
    assert len(read_table(write(tmp_path, text.replace("timestamp", "tokens")), x="tokens")) == 3
    assert len(read_table(write(tmp_path, text + "0,.3\n"), x="timestamp")) == 4


def test_a_column_of_dates_in_a_data_frame_is_no_compute():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"time": pandas.date_range("2026-01-01", periods=3), "acc": [0.2, 0.3, 0.4]})
    with pytest.raises(InputError, match="data frame, column 'time': holds dates or durations"):
        Points.from_frame(frame, x="time", y="acc")


def test_a_column_that_nobody_asked_for_may_be_anything(tmp_path):
    text = "gpu_hours,loss,loss,,,pass_rate\n1,nan,x,,,.5\n"
    assert len(read_table(write(tmp_path, text))) == 1
    assert len(read_table(write(tmp_path, '{"gpu_hours": 1, "loss": NaN, "pass_rate": 0.5}\n'))) == 1


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_table(tmp_path / "nothing.csv")


@pytest.mark.parametrize("text", ["gpu_hours,pass_rate\n1,.5\n", '{"gpu_hours": 1, "pass_rate": 0.5}\n'])
def test_a_pipe_is_read_once(tmp_path, text):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    points = read_table(pipe)
    writer.join()
    np.testing.assert_allclose(points.pass_rate_N, [0.5])


def test_rewards_of_a_column(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("steps,eval_score,acc\n" + "".join(f"{n},{n / 2 - 1.5},{n / 10}\n" for n in range(10)))
    points = read_table(path, "steps", "eval_score", max_reward=3.5, min_reward=-1.5)
    assert points.pass_rate_N == pytest.approx(np.arange(10) / 10)
    assert any("(reward + 1.5) / 5" in text for text in points.warnings)
    with pytest.raises(InputError, match="'acc' is a share that lies in"):
        read_table(path, "steps", "acc", max_reward=100.0)


RISING = ["0,.20", "50,.30", "100,.36", "150,.40", "200,.42", "250,.43"]


def told(tmp_path, header, rows, **options):
    points = read_table(write(tmp_path, "\n".join([header, *rows]) + "\n"), **options)
    return " ".join(points.warnings)


def test_rows_of_two_data_sets_are_reported(tmp_path):
    rows = [f"{row},{name}" for row in RISING for name in ("math", "code")]
    assert "rows of several dataset (math, code)" in told(tmp_path, "gpu_hours,pass_rate,dataset", rows)
    # A model that changes once, or an unknown name, is none of that.
    halves = [f"{row},{'a' if n < 3 else 'b'}" for n, row in enumerate(RISING)]
    assert not told(tmp_path, "gpu_hours,pass_rate,model", halves)
    assert not told(tmp_path, "gpu_hours,pass_rate,model", RISING)


@pytest.mark.parametrize("cell", ["", " ", "NA", "N/A", "null", "NULL", "None"])
def test_a_cell_without_a_value_is_no_evaluation(tmp_path, cell):
    points = read_table(write(tmp_path, "\n".join(["gpu_hours,pass_rate", *RISING, f"300,{cell}"])))
    assert len(points) == 6
    assert "1 row left out, without a 'pass_rate'" in " ".join(points.warnings)


def test_rows_of_two_metrics_are_refused(tmp_path):
    rows = [f"{row},{name}" for row in RISING for name in ("acc", "f1")]
    with pytest.raises(
        InputError, match=r"several metrics \(acc, f1\), and a curve is of one: keep the rows"
    ):
        told(tmp_path, "gpu_hours,value,metric", rows, y="value")
    one = [f"{row},acc" for row in RISING]
    assert "metric" not in told(tmp_path, "gpu_hours,value,metric", one, y="value")


def test_compute_of_a_step_is_reported(tmp_path):
    each = [f"{n * 10},{50 + (-1) ** n},{row.split(',')[1]}" for n, row in enumerate(RISING)]
    assert "line 3: gpu_hours is 49 at step 10, but 51 at step 0" in told(
        tmp_path, "step,gpu_hours,pass_rate", each
    )


def test_a_second_run_in_the_table_is_reported(tmp_path):
    assert "line 8: gpu_hours 0 comes after 250" in told(tmp_path, "gpu_hours,pass_rate", RISING * 2)
    assert "line 8: steps 0 comes after 250" in told(tmp_path, "step,pass_rate", RISING * 2)
    late = [*RISING[:3], RISING[4], RISING[3], RISING[5]]
    for rows in (RISING, RISING[::-1], late, RISING[:1]):
        assert not told(tmp_path, "gpu_hours,pass_rate", rows)


@pytest.mark.parametrize("name", ["pass@8", "eval/aime/pass@16", "pass_at_4", "maj@32", "best@k", "cons@64"])
def test_a_metric_of_several_completions_is_reported(tmp_path, name):
    assert "no pass rate of single completions" in told(tmp_path, f"gpu_hours,{name}", RISING, y=name)


@pytest.mark.parametrize("name", ["val_loss", "error_rate", "eval/kl", "entropy", "perplexity"])
def test_a_metric_that_is_no_share_is_reported(tmp_path, name):
    assert "is no share of right answers" in told(tmp_path, f"gpu_hours,{name}", RISING, y=name)


@pytest.mark.parametrize(
    "name", ["pass@1", "acc/mean@16", "eval/loss/accuracy", "avg@8", "pass_rate", "score"]
)
def test_a_pass_rate_is_not_doubted(tmp_path, name):
    assert not told(tmp_path, f"gpu_hours,{name}", RISING, y=name)


def test_a_data_frame_is_doubted_as_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"gpu_hours": [0, 0, 1, 1], "pass@8": [0.2, 0.1, 0.4, 0.3], "seed": [0, 1, 0, 1]}
    )
    told = " ".join(Points.from_frame(frame, y="pass@8").warnings)
    assert "rows of several seed (0, 1)" in told
    assert "no pass rate of single completions" in told


@pytest.mark.parametrize("rows", [[-1], [-2, -1], [5], [0, 1, 2, 3, 5, 6, 9, 10], []])
@pytest.mark.parametrize("steps", [False, True])
def test_nan_in_a_data_frame_counts_as_in_a_csv(tmp_path, rows, steps):
    """Where the last is NaN both withhold the verdict; NaN in most rows stands for none in both."""
    pandas = pytest.importorskip("pandas")
    hours_R = np.arange(1.0, 16.0)
    rate_R = 0.1 + 0.5 / (1 + (4 / hours_R) ** 1.5)
    rate_R[rows] = np.nan
    frame = pandas.DataFrame({"gpu_hours": hours_R, "pass_rate": rate_R})
    frame = frame.assign(step=10 * np.arange(15)) if steps else frame
    frame.to_csv(tmp_path / "log.csv", index=False, na_rep="nan")
    own, table = Points.from_frame(frame), read_table(tmp_path / "log.csv")
    assert own.left_out.counts == table.left_out.counts
    assert own.left_out.ending == table.left_out.ending
    assert bool(own.left_out.ending) == (-1 in rows)
    verdict = fit(frame).verdict(0.3, 60.0)
    assert verdict == fit(table).verdict(0.3, 60.0)
    assert (verdict == "too early") == (-1 in rows)


def test_one_compute_for_all_is_refused_with_the_reason(tmp_path):
    rows = [f"50,{row.split(',')[1]}" for row in RISING]
    points = read_table(write(tmp_path, "\n".join(["gpu_hours,pass_rate", *rows])))
    text = r"6 evaluations at only 1 value of gpu_hours .give totals since the start, or"
    with pytest.raises(CannotAnswerError, match=text):
        fit(points)


def test_an_array_of_objects_is_read_as_their_lines(tmp_path):
    rows = [{"step": step, "eval_acc": 0.1 * step, "loss": math.nan} for step in range(1, 8)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2))
    lines, array = (read_table(tmp_path / name) for name in ("lines.jsonl", "array.json"))
    assert array.compute_N.tolist() == lines.compute_N.tolist() == list(range(1, 8))
    assert array.pass_rate_N.tolist() == lines.pass_rate_N.tolist()
    assert np.array_equal(np.asarray(array.line_N), np.asarray(lines.line_N))
    assert (array.axis, array.metric) == (lines.axis, lines.metric)


def test_a_pattern_names_a_column(tmp_path):
    path = write(tmp_path, "\n".join(["gpu_hours,math/acc,code/acc", *(f"{row},.1" for row in RISING)]))
    assert read_table(path, y="math*").pass_rate_N[1] == 0.3
    assert read_table(path, y="eval/acc,*de/acc").pass_rate_N[1] == 0.1  # of a list the first there is
    with pytest.raises(InputError, match=r"math/acc, code/acc are like '\*acc': choose one with --y"):
        read_table(path, y="*acc")
    with pytest.raises(InputError, match=r"no column 'eval\*'"):
        read_table(path, y="eval*")


def test_a_table_without_an_evaluation_is_no_disorder(tmp_path):
    points = read_table(write(tmp_path, "gpu_hours,step,pass_rate\n0,0,\n1,5,\n"))
    assert len(points) == 0


@pytest.mark.parametrize("word", ["step", "steps", "time"])
def test_another_word_for_compute_has_the_column_of_compute_as_a_hint(tmp_path, word):
    path = write(tmp_path, "gpu_hours,pass_rate\n1,.5\n")
    with pytest.raises(InputError, match=f"no column '{word}'; did you mean 'gpu_hours'\\?"):
        read_table(path, x=word)
