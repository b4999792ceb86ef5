from __future__ import annotations

import math

import pytest

from scalerl.curve import FAMILIES
from scalerl.record.evaluation import AXES
from scalerl.view.numbers import (
    duration,
    family_name,
    family_weights,
    interval,
    one_unit,
    percent,
    plain,
    rate,
    rate_interval,
    unit_for,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8034, "0.803"),
        (0.0, "0.000"),
        (1.0, "1.000"),
        (0.9996, "1.000"),
        (-0.25, "−0.250"),
        (math.nan, "–"),
        (None, "–"),
        ("x", "–"),
    ],
)
def test_rate(value, text):
    assert rate(value) == text


def test_intervals_need_both_ends():
    assert rate_interval([0.771, 0.832]) == "[0.771, 0.832]"
    assert rate_interval([0.771, None]) == "–"
    assert rate_interval(None) == "–"
    assert interval([4.2, math.inf], plain) == "[4.20, ∞]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (16, "16"),
        (8.0, "8"),
        (1.921, "1.92"),
        (61440, "61,440"),
        (0.00021, "2.10e-04"),
        (12345.6, "12,346"),
    ],
)
def test_plain(value, text):
    assert plain(value) == text


@pytest.mark.parametrize(
    ("axis", "amount", "text"),
    [
        ("flops", 1.464e13, "14.6 TFLOP"),
        ("flops", 2.5e21, "2.50 ZFLOP"),
        ("gpu_hours", 7400.0, "7,400 GPU-hours"),
        ("gpu_hours", 0.5, "30 GPU-minutes"),
        ("gpu_hours", 0.01, "36 GPU-seconds"),
        ("tokens", 624_000, "624 thousand tokens"),
        ("samples", 3840, "3,840 completions"),
        ("gpu_days", 12.5, "12.5 gpu_days"),
    ],
)
def test_units_keep_the_amount(axis, amount, text):
    assert unit_for(axis, amount).show(amount) == text


def test_shares_and_durations():
    assert (percent(0.5), percent(0.024), percent(0), percent(None)) == ("50 %", "2.4 %", "0 %", "–")
    assert (duration(35), duration(252), duration(27_000), duration(math.nan)) == (
        "35 s",
        "4.2 min",
        "7.5 h",
        "–",
    )


def test_families_have_the_names_that_people_use():
    names = [family_name(family.name) for family in FAMILIES]
    assert sorted(names) == [
        *("Burr", "Fréchet", "Weibull", "burst", "log-logistic", "power law", "ramp", "two speeds")
    ]
    assert family_name("gompertz") == "gompertz"
    assert family_weights({"frechet": 0.31, "log_logistic": 0.69}) == "log-logistic 0.69, Fréchet 0.31"
    assert family_weights({"weibull": 1.0, "power_law": None}) == "Weibull 1.00"  # as older fits stored it
    assert family_weights(None) == "–"


def test_every_axis_has_a_word_for_one_unit():
    words = ["GPU-hour", "FLOP", "token", "processed token", "completion", "step", "dollar"]
    assert [one_unit(axis) for axis in AXES] == words
    assert one_unit("hours") == "unit of hours"
