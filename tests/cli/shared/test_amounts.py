"""Amounts of compute as they are typed: what each is, what is refused, and what is said of those far off."""

import argparse
import json

import example_files
import pytest

from scalerl.cli.main import main
from scalerl.cli.shared.arguments import amount, amounts
from scalerl.errors import InputError


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("12000", 12_000, ""),
        ("12_000", 12_000, ""),
        ("12k", 12_000, ""),
        ("1.5M", 1.5e6, ""),
        ("2B", 2e9, ""),
        ("1e9", 1e9, ""),
        ("3.3E-2", 0.033, ""),
        (" .5T ", 0.5e12, ""),
        ("+7.", 7, ""),
        ("2x", 2, "x"),
        ("0.5 x", 0.5, "x"),
        ("600 steps", 600, "steps"),
        ("600steps", 600, "steps"),
        ("1.2M steps", 1.2e6, "steps"),
        ("12 GPU-hours", 12, "GPU-hours"),
        ("12 ksteps", 12, "ksteps"),
    ],
)
def test_what_an_amount_is(text, value, unit):
    found = amount()(text)
    assert found.value == pytest.approx(value, rel=1e-12)
    assert found.unit == unit


@pytest.mark.parametrize(
    "text", ["", "k", "1__0", "_1", "12 000", "1,5", "nan", "inf", "1e999", "٣", "0x10", "1.2.3"]
)
def test_what_is_no_amount(text):
    with pytest.raises((argparse.ArgumentTypeError, InputError)) as error:
        amount()(text).on("--at", "gpu_hours", 100.0, ["gpu_hours"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8000,16000", (8000, 16000)),
        ("100,200", (100, 200)),
        ("100,200,400", (100, 200, 400)),
        ("10,20,400", (10, 20, 400)),
        ("5,100,1000", (5, 100, 1000)),
        ("12, 500", (12, 500)),
        ("1k,2k", (1000, 2000)),
        ("500,20", (500, 20)),
        ("0,100", (0, 100)),
        ("1.5,2.5", (1.5, 2.5)),
    ],
)
def test_lists(text, values):
    assert tuple(one.value for one in amounts(text)) == values


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("12,000", "12000 or 12k"),
        ("12,500", "12500, or --at 12 --at 500"),
        ("100,050", "100050"),
        ("200,100", "200100, or --at 200 --at 100"),
        ("1,000,000", "1000000 or 1000k"),
        ("1,234,567", "1234567, or --at 1 --at 234 --at 567"),
        ("12,000,24,000", "12000,24000 or 12k,24k"),
        ("12,000 steps", "'12000 steps' or '12k steps'"),
        ("12,000.5", "12000.5"),
        ("2x,600 steps,12,000", "'2x,600 steps,12000' or '2x,600 steps,12k'"),
        ("600 steps,12,500", "'600 steps,12500', or --at '600 steps' --at 12 --at 500"),
    ],
)
def test_a_comma_within_a_number_is_refused_with_what_to_write(text, one):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        amounts(text)
    assert str(error.value).endswith(f": write {one}")
    with pytest.raises(argparse.ArgumentTypeError) as error:
        amount()(text)
    assert f"expected one amount of compute, found {text!r}: write {one.partition(', or ')[0]}" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("text", "axis", "value"),
    [
        ("2x", "gpu_hours", 300),
        ("600 steps", "steps", 600),
        ("1 step", "steps", 1),
        ("12 GPU-hours", "gpu_hours", 12),
        ("12 gpu_hours", "gpu_hours", 12),
        ("1e20 FLOP", "flops", 1e20),
        ("3M completions", "samples", 3e6),
        ("5 hours", "hours", 5),
        ("7 x", "gpu_hours", 1050),
        ("300GFLOP", "flops", 3e11),
        ("300 GFLOPs", "flops", 3e11),
        ("300G", "flops", 3e11),
        ("1e18FLOP", "flops", 1e18),
        ("2TFLOP", "flops", 2e12),
        ("1.5 EFLOP", "flops", 1.5e18),
        ("12h", "gpu_hours", 12),
        ("90 GPU-minutes", "gpu_hours", 1.5),
        ("7200s", "gpu_hours", 2),
        ("1.2ksteps", "steps", 1200),
        ("1.5 billion tokens", "tokens", 1.5e9),
        ("2 million processed tokens", "tokens_processed", 2e6),
        ("300 GFLOP", "GFLOP", 300),
    ],
)
def test_an_amount_on_its_axis(text, axis, value):
    assert amount()(text).on("--at", axis, 150.0, ["gpu_hours", "steps"]) == value


@pytest.mark.parametrize(
    ("text", "axis", "reach", "message"),
    [
        ("600 steps", "gpu_hours", 150.0, "for an answer in steps add --x steps"),
        ("1e9 tokens", "gpu_hours", 150.0, "tokens are not logged; axes here: gpu_hours, steps"),
        ("12 bananas", "gpu_hours", 150.0, "'bananas' is neither a unit of an axis nor k, M, G, B or T"),
        ("12m", "gpu_hours", 150.0, "'m' is neither a unit of an axis nor k, M, G, B or T"),
        ("300GFLOP", "gpu_hours", 150.0, "compute is on the axis gpu_hours here, and flops are not logged"),
        ("12h", "steps", 150.0, "compute is on the axis steps here, to which gpu_hours have no fixed rate"),
        (
            "12 GPU-hours",
            "dollars",
            150.0,
            "--price measures compute in dollars; leave it out, or name dollars",
        ),
        ("2x", "x", 150.0, "times the data, or in the unit of the axis 'x'"),
        ("2x", "steps", None, "takes no multiple of the data"),
    ],
)
def test_an_amount_of_something_else_is_refused(text, axis, reach, message):
    with pytest.raises(InputError) as error:
        amount()(text).on("--at", axis, reach, ["gpu_hours", "steps"])
    assert str(error.value).startswith(f"--at '{text}': ")
    assert message in str(error.value)


@pytest.fixture
def files(tmp_path, monkeypatch):
    example_files.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_multiples_of_the_data_and_amounts_far_beyond_them(files, capsys):
    words = ["fit", "runs/mine", "--max-compute", "0.8x", "--at", "2x", "--at", "5k", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["compute"] for one in found["forecast"]] == [20_000, 5_000, 80_000]
    assert found["max_compute"] == 8_000
    assert not any("beyond the data" in text for text in found["warnings"])
    warning = "800000 GPU-hours is 80 times beyond the data, which reach 1e+04 GPU-hours"
    assert main(["fit", "runs/mine", "--at", "800k"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(f"warning: {warning}\n") == 1
    assert "at 800,000 GPU-hours" in captured.out
    assert main(["fit", "runs/mine", "--at", "800 steps"]) == 2
    assert "for an answer in steps add --x steps" in capsys.readouterr().err


def test_an_amount_that_was_meant_on_another_axis_is_told_so(files, capsys):
    """The run has 100 steps of 100 GPU-hours each."""
    words = [
        "fit",
        "runs/mine",
        "--x",
        "steps",
        "--at",
        "16000",
        "--budget",
        "20_000",
        "--target",
        ".5",
        "--json",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["warnings"][-1] == (
        "16000 and 20000 steps are up to 200 times beyond the data, which reach 100 steps; if it was "
        "meant in GPU-hours, of which they reach 1e+04: --x gpu_hours"
    )


def test_what_compares_and_reports_warns_as_well(files, capsys):
    runs, far = ["runs/a-seed0", "runs/b-seed0", "--x", "steps"], "16000 steps is 160 times beyond the data"
    assert main(["compare", *runs, "--budget", "16k", "--json"]) == 0
    assert sum(far in text for text in json.loads(capsys.readouterr().out)["warnings"]) == 1
    assert main(["report", *runs, "--budget", "16k", "--json", "-o", "page.html"]) == 0
    assert [far in text for text in json.loads(capsys.readouterr().out)["warnings"]] == [True]
    assert far in (files / "page.html").read_text()
    assert main(["watch", "runs/mine", "--x", "steps", "--budget", "16k steps", "--once", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(far) == 1
    assert far in json.loads(captured.out)["warnings"][-1]
    assert main(["watch", "runs/mine", "--budget", "2x", "--once"]) == 2
    assert "takes no multiple of the data" in capsys.readouterr().err
