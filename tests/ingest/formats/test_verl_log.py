import json
from dataclasses import replace

import numpy as np
import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings
from read_logs import read_logs

from scalerl import InputError, limits
from scalerl.ingest.formats.metrics_jsonl import VERL as FORMAT

# As verl.utils.tracking.FileLogger writes it: {"step": step, "data": data} by orjson, which has null for NaN.
ROWS = [
    {"step": 0, "data": {"val-core/openai/gsm8k/reward/mean@1": 0.25}},
    {"step": 1, "data": {"actor/entropy": 0.3, "actor/pg_loss": None, "training/global_step": 1}},
    {"step": 2, "data": {"actor/entropy": 0.2, "timing_s/step": 12.5}},
]
JSONL = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in ROWS)


def write(folder, text, name="one.log"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def check(log):
    assert log.name == "one"
    assert log.metrics["actor/entropy"].step_N.tolist() == [1, 2]
    assert log.metrics["actor/entropy"].value_N.tolist() == [0.3, 0.2]
    assert log.metrics["val-core/openai/gsm8k/reward/mean@1"].step_N.tolist() == [0]
    assert log.metrics["timing_s/step"].value_N.tolist() == [12.5]
    assert np.isnan(log.metrics["timing_s/step"].time_N).all()
    assert "actor/pg_loss" not in log.names


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows(tmp_path, mark, end):
    path = write(tmp_path, mark + JSONL.replace("\n", end))
    assert FORMAT.recognises(path)
    (log,) = read_logs(FORMAT, path, everything)
    assert log.notes == ()
    check(log)


def test_times_that_were_added(tmp_path):
    rows = [{**row, "timestamp": 1.7e9 + row["step"]} for row in ROWS]
    (log,) = read_logs(FORMAT, write(tmp_path, "\n".join(map(json.dumps, rows))), everything)
    assert log.metrics["actor/entropy"].time_N.tolist() == [1.7e9 + 1, 1.7e9 + 2]


def test_unfinished_ends(tmp_path):
    (log,) = read_logs(FORMAT, write(tmp_path, JSONL[:-30]), everything)
    assert len(log.notes) == 1
    assert "is unfinished" in log.notes[0]
    assert log.metrics["actor/entropy"].step_N.tolist() == [1]
    (log,) = read_logs(FORMAT, write(tmp_path, JSONL[:-1]), everything)  # whole but for its line break
    check(log)


def test_a_restart(tmp_path):
    rows = [(step, 0.1) for step in range(1, 6)] + [(step, 0.2) for step in range(3, 5)]
    text = "".join(json.dumps({"step": n, "data": {"actor/grad_norm": v}}) + "\n" for n, v in rows)
    (log,) = read_logs(FORMAT, write(tmp_path, text), everything)
    assert log.metrics["actor/grad_norm"].value_N.tolist() == [0.1, 0.1, 0.2, 0.2]
    assert (
        "restarted at step 3 (line 6): what was logged before for steps 3 to 5 is superseded" in log.notes[0]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (JSONL + "garbage\n" + JSONL, "line 4: not JSON"),
        (JSONL + '{"step": 1}\n', "line 4: .*expected a row as"),
        (JSONL + "[1]\n", "line 4: expected one JSON object"),
        ("nothing of the kind\n", "line 1: not JSON"),
        ("", "no row of verl's logger in it"),
        (JSONL.encode("utf-16"), "UTF-16"),
        (JSONL + "\0\n", "line 4: a binary file"),
    ],
)
def test_errors(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as error:
        read_logs(FORMAT, path, everything)
    assert str(path) in str(error.value)


def test_what_is_not_recognised(tmp_path):
    for text in ('{"step": 1, "loss": 2}\n', "step,loss\n1,2\n", "step:1\n", "\0step:1 - a:1\n", ""):
        assert not FORMAT.recognises(write(tmp_path, text))
    assert not FORMAT.recognises(tmp_path)


def test_lines_that_are_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROW", replace(limits.ROW, most=200))
    text = ROWS_LINE + '{"step": 2, "data": {"a": "' + "x" * 300 + '"}}\n'
    with pytest.raises(InputError, match="line 2: 201 bytes in one line or row, and the limit is 200: "):
        read_logs(FORMAT, write(tmp_path, text), everything)


ROWS_LINE = json.dumps(ROWS[1]) + "\n"


@settings(max_examples=200)
@given(data=damaged(JSONL.encode()))
def test_damaged_jsonl(tmp_path, data):
    read_hostile(FORMAT, write(tmp_path, data))
