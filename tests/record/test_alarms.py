"""Reading alarms.jsonl: spans from lines, and what a fit says of them."""

import json

import pytest

from scalerl.errors import InputError
from scalerl.record.alarms import Alarm, read_alarms, warnings_of


def line(step, level, since=None, over=False, metric="truncated", worst=0.1, threshold=0.1):
    since = step if since is None else since
    row = {"step": step, "metric": metric, "level": level, "value": worst, "threshold": threshold}
    return row | {"since": since, "worst": worst, "over": over}


@pytest.fixture
def read(tmp_path):
    """The alarms of some lines, and the warnings of reading them."""

    def read(*lines, end="\n"):
        path, warnings = tmp_path / "alarms.jsonl", []
        path.write_text("\n".join(json.dumps(row) for row in lines) + end)
        return read_alarms(path, warnings), warnings

    return read


def test_a_run_without_the_file_has_no_alarms(tmp_path):
    assert read_alarms(tmp_path / "alarms.jsonl", []) == ()


def test_an_alarm_lasts_until_the_line_that_ends_it(read):
    alarms, _ = read(
        line(40, "alarm", worst=0.12),
        line(50, "alarm", metric="ess", worst=0.2, threshold=0.3),
        line(60, "alarm", since=40, over=True, worst=0.2),
    )
    assert alarms == (
        Alarm("truncated", "alarm", 40, 60, 0.2, 0.1),
        Alarm("ess", "alarm", 50, None, 0.2, 0.3),
    )
    assert str(alarms[0]) == "truncated 0.2 (threshold 0.1), steps 40 to 60"
    assert str(alarms[1]) == "ess 0.2 (threshold 0.3), from step 50 on"


def test_a_warning_ends_where_it_becomes_an_alarm(read):
    alarms, _ = read(
        line(10, "warning", threshold=0.05),
        line(30, "alarm"),
        line(70, "alarm", since=30, over=True),
        line(90, "warning", threshold=0.05),
    )
    assert [(a.level, a.first, a.last) for a in alarms] == [
        ("warning", 10, 30),
        ("alarm", 30, 70),
        ("warning", 90, None),
    ]


def test_a_fit_is_warned_of_alarms_in_what_it_saw(read):
    alarms, _ = read(
        line(10, "warning"),
        line(30, "alarm"),
        line(40, "alarm", since=30, over=True, worst=0.14),
        line(50, "alarm", metric="ess", worst=0.2, threshold=0.3),
        line(80, "alarm"),
    )
    assert warnings_of(alarms, 29) == ()  # a warning is none, and the alarms came later
    (one,) = warnings_of(alarms, 45)
    assert one == (
        "health alarm: truncated 0.14 (threshold 0.1), steps 30 to 40; the curve may not be the same before "
        "and after"
    )
    assert warnings_of(alarms, 100) == (
        one.replace("40;", "40 (the first of 2);"),
        one.replace(
            "truncated 0.14 (threshold 0.1), steps 30 to 40", "ess 0.2 (threshold 0.3), from step 50 on"
        ),
    )


def test_an_unfinished_last_line_is_left_out_with_a_warning(read):
    alarms, warnings = read(line(40, "alarm"), end='\n{"step": 4')
    assert len(alarms) == 1
    assert len(warnings) == 1


def test_a_value_that_json_does_not_have_is_infinite(read):
    ((alarm,), _) = read(line(40, "alarm", metric="grad_norm") | {"worst": None})
    assert alarm.worst == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "fatal"}, r"line 2: an alarm has a 'metric' and a 'level' \(warning or alarm\), found"),
        ({"metric": None}, "line 2: an alarm has a 'metric'"),
        ({"since": -1}, "line 2: 'since' must be a whole number"),
        ({"threshold": "high"}, "line 2: 'threshold' must be a finite number"),
    ],
)
def test_a_line_that_is_no_alarm_is_named(read, change, message):
    with pytest.raises(InputError, match=message):
        read(line(10, "warning"), line(40, "alarm") | change)
