"""What a run folder may hold, and what is said where it holds something else."""

import json
import math

import numpy as np
import pytest

from scalerl import CannotAnswerError, InputError, RunRecord
from scalerl.curve import Points, fit

GOOD = {
    "step": 100,
    "pass_rate": 0.3,
    "device_seconds": {"generate": 1.0, "train": 1.0, "evaluate": 1.0, "idle": 0.0},
    "n_prompts": 100,
    "n_samples": 16,
    "mean_p_1mp": 0.16,
}


def folder(tmp_path, *rows, config=None):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "evals.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "100"}, "'step' must be a finite number.*found '100'"),
        ({"step": True}, "'step' must be a finite number.*found True"),
        ({"step": 1.5}, "'step' must be a whole number of 0 or more, found 1.5"),
        ({"step": -1}, "'step' must be a whole number of 0 or more, found -1"),
        ({"step": 10**17}, "'step' must be a whole number"),
        ({"step": None}, "no 'step'"),
        ({"pass_rate": None}, "no 'pass_rate'"),
        ({"pass_rate": "61.0%"}, "'pass_rate' must be a finite number.*found '61.0%'"),
        ({"pass_rate": math.nan}, "'pass_rate' must be a finite number.*found nan"),
        ({"pass_rate": [0.3]}, r"'pass_rate' must be a finite number.*found \[0.3\]"),
        ({"time": "2025-01-01"}, "'time' must be a finite number, or null.*'2025-01-01'"),
        ({"samples": math.inf}, "'samples' must be a finite number.*inf"),
        ({"samples": 10**400}, r"'samples' must be a finite number.*found 1000\S+\.\.\.0000"),
        ({"entropy": False}, "'entropy' must be a finite number.*False"),
        ({"version": 2.5}, "'version' must be a whole number of -1 or more"),
        ({"n_prompts": "100"}, "'n_prompts' must be a finite number"),
        ({"n_samples": -4}, "'n_samples' must be a whole number"),
        ({"device_seconds": 3600}, "'device_seconds' must be an object of counters, found 3600"),
        ({"device_seconds": [1, 2]}, "'device_seconds' must be an object of counters"),
        ({"device_seconds": {"train": "1"}}, "'device_seconds.train' must be a finite number.*'1'"),
        ({"flops": {"generate": True}}, "'flops.generate' must be a finite number.*True"),
        ({"tokens": {"trained": math.nan}}, "'tokens.trained' must be a finite number.*nan"),
        ({"mean_p_1mp": {"deep": [[[[[[[[[]]]]]]]]]}}, "'mean_p_1mp' must be a finite number"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_line(tmp_path, changes, message):
    run = folder(tmp_path, {**GOOD, "step": 0}, "", {**GOOD, **changes})
    with pytest.raises(InputError, match=rf"evals\.jsonl, line 3: .*{message}") as caught:
        RunRecord.read(run)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pass_rate": 61.0}, "pass rate 61 is above 1"),
        ({"device_seconds": {"generate": -7.2e6, "train": 0, "idle": 0}}, "gpu_hours -2000 is negative"),
        (
            {"device_seconds": {"generate": 1.7e308, "train": 1.7e308, "idle": 0}},
            "gpu_hours inf is not a finite",
        ),
        ({"mean_p_1mp": 1e300}, "noise sd 2.5e\\+148"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_line(tmp_path, changes, message):
    run = folder(tmp_path, {**GOOD, "step": 0}, "", {**GOOD, **changes})
    with pytest.raises(InputError, match=rf"evals\.jsonl, line 3: {message}"):
        Points.from_record(RunRecord.read(run))


def test_null_and_keys_that_nobody_knows_are_passed_over(tmp_path):
    row = {
        "step": 3.0,
        "pass_rate": 1,
        "entropy": None,
        "flops": None,
        "n_prompts": None,
        "n_samples": None,
        "tokens": {"generated": None, "discarded": "many"},
        "reward": "x",
    }
    (point,) = RunRecord.read(folder(tmp_path, row)).evals
    assert (point.step, point.pass_rate, point.n_prompts) == (3, 1.0, 0)
    assert all(map(math.isnan, (point.entropy, point.tokens.generated, point.noise_sd, point.total_samples)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "more than 100 levels"),
        ('{"step": 1, "pass_rate": ' + "9" * 5000 + "}", "not JSON"),
        ("[1]", "expected one JSON object"),
        ("NaN", "expected one JSON object"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_a_line_that_is_no_object(tmp_path, line, message):
    with pytest.raises(InputError, match=rf"line 2: {message}"):
        RunRecord.read(folder(tmp_path, GOOD, line, GOOD))


def test_evals_with_a_byte_order_mark_and_windows_line_ends(tmp_path):
    text = json.dumps(GOOD).encode()
    (tmp_path / "evals.jsonl").write_bytes(b"\xef\xbb\xbf" + text + b"\r\n" + text + b"\r\n")
    assert len(RunRecord.read(tmp_path).evals) == 2
    (tmp_path / "evals.jsonl").write_bytes(text.decode().encode("utf-16"))
    with pytest.raises(InputError, match=r"evals\.jsonl: a text in UTF-16; expected UTF-8"):
        RunRecord.read(tmp_path)


def test_what_is_no_run_folder(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("a,b\n")
    for path, message in (
        (file, "a file, not a run folder"),
        (tmp_path, "no evals.jsonl in it"),
        (tmp_path / "nothing", "no such run folder"),
        (tmp_path / ("long" * 100), "File name too long"),
    ):
        with pytest.raises(InputError, match=message):
            RunRecord.read(path)


def test_no_evaluation_yet(tmp_path):
    record = RunRecord.read(folder(tmp_path))
    assert record.evals == ()
    with pytest.raises(CannotAnswerError, match="0 evaluations"):
        fit(record)


def counters(**which):
    return [
        {"step": i, "pass_rate": 0.1, **{k: dict.fromkeys(v, i) for k, v in which.items()}} for i in range(3)
    ]


SECONDS = ("generate", "train", "idle")


@pytest.mark.parametrize(
    ("which", "config", "axis"),
    [
        ({"device_seconds": SECONDS, "flops": ("generate", "train")}, None, "gpu_hours"),
        (
            {"device_seconds": SECONDS, "flops": ("generate", "train")},
            {"budget": {"kind": "flops", "amount": 1e12}},
            "flops",
        ),
        ({"device_seconds": SECONDS}, {"budget": {"kind": "steps"}}, "steps"),
        ({"device_seconds": SECONDS}, {"budget": {"kind": "flops"}}, "gpu_hours"),  # named, and not logged
        ({"device_seconds": SECONDS}, {"budget": {"kind": "wall_hours"}}, "gpu_hours"),
        ({"device_seconds": SECONDS}, {"budget": [1, 2]}, "gpu_hours"),
        ({"device_seconds": ("generate", "train"), "tokens": ("generated", "trained")}, None, "tokens"),
        ({}, None, "steps"),
    ],
)
def test_the_default_axis_is_that_of_the_budget_else_the_first_logged(tmp_path, which, config, axis):
    assert RunRecord.read(folder(tmp_path, *counters(**which), config=config)).default_axis == axis


def test_an_axis_that_was_not_logged_names_those_that_were(tmp_path):
    record = RunRecord.read(folder(tmp_path, *counters(tokens=("generated", "trained"))))
    others = "use --x tokens or tokens_processed or steps$"
    with pytest.raises(InputError, match=f"no times of steps, so no GPU-hours: {others}"):
        record.compute()
    with pytest.raises(InputError, match=f"behind the axis 'flops' are missing: {others}"):
        record.compute("flops")


@pytest.mark.parametrize("price", [0.0, -1.0, math.nan, math.inf])
def test_a_price_is_above_zero(tmp_path, price):
    record = RunRecord.read(folder(tmp_path, *counters(device_seconds=SECONDS)))
    with pytest.raises(InputError, match="price of a GPU-hour must be a number of dollars above 0"):
        record.compute("dollars", price)


def test_samples_and_noise_of_a_record(tmp_path):
    other = {**GOOD, "pass_rate": 0.31}
    rows = [GOOD, {**other, "n_samples": 1, "mean_p_1mp": None}, {**GOOD, "n_prompts": 0}]
    points = Points.from_record(RunRecord.read(folder(tmp_path, *rows)))
    np.testing.assert_allclose(points.samples_N, [1600, 100, np.nan])
    np.testing.assert_allclose(points.noise_sd_N, [0.01, np.nan, np.nan])  # sqrt(.16 / 1600)
    assert len(points) == 3  # repeated evaluations of one step stay apart
    assert [w.split("evals.jsonl: ")[1][:56] for w in points.warnings] == [
        "the evaluation noise is unknown at one sample per prompt",
        "1 evaluation has the compute and the pass rate of anothe",
    ]
