"""Files of W&B that are damaged, torn, or none of its."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hostile_logs import alarm, everything
from hypothesis import example, given, settings, strategies as st
from read_logs import read_logs
from wandb_files import BLOCK, MAGIC, header, history, read_one, values, written

from scalerl import InputError
from scalerl.ingest.formats.wandb_offline import FORMAT


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty"),
        (MAGIC[:5], "ends after 5 bytes"),
        (b"step,loss\n1,2\n", "not a file of W&B, it begins with b'step,lo'"),
        (MAGIC[:6] + b"\x01", "unknown version"),
        (bytes(40000), "not a file of W&B"),
    ],
)
def test_files_that_are_none(tmp_path, data, why):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    with pytest.raises(InputError) as raised:
        read_logs(FORMAT, path, everything)
    assert str(raised.value).startswith(f"{path}: ")
    assert why in str(raised.value)
    assert "expected a run-ID.wandb" in str(raised.value)


def test_what_is_recognised(run, tmp_path):
    assert FORMAT.recognises(run)
    assert FORMAT.recognises(Path(shutil.copy(run, tmp_path / "renamed")))
    (tmp_path / "renamed").unlink()
    (tmp_path / "log.csv").write_text("step,loss\n")
    (tmp_path / "wandb").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "log.csv", tmp_path / "nothing", tmp_path / "wandb", tmp_path / "pipe"):
        assert not FORMAT.recognises(path)
    with pytest.raises(InputError, match="no file of W&B there; expected"):
        read_logs(FORMAT, tmp_path, everything)


def cut(run, tmp_path, size):
    path = tmp_path / "run-one.wandb"
    path.write_bytes(run.read_bytes()[:size])
    return path


def test_a_torn_file_is_read_up_to_the_tear(run, tmp_path):
    size = run.stat().st_size
    assert size > 4 * BLOCK
    draw = random.Random(0)
    before = 0
    for at in sorted(
        [draw.randrange(size) for _ in range(50)] + [7, 20, BLOCK - 3, BLOCK, BLOCK + 3, 2 * BLOCK]
    ):
        path = cut(run, tmp_path, at)
        try:
            log = read_one(path)
        except InputError:
            assert at < len(MAGIC)
            continue
        found = values(log, "loss") if "loss" in log.metrics else {}
        assert found == {n: 1 / (n + 1) for n in range(len(found))}
        assert len(found) >= before
        before = len(found)
        others = ("ends within a record", "no numbers were logged", "has no history, only a summary")
        assert all(any(other in note for other in others) for note in log.notes)
    assert before > 50
    torn = read_one(cut(run, tmp_path, size - 1))
    assert torn.notes == (
        "run-one.wandb ends within a record (the run was killed, or still writes): read up to there",
    )


def test_a_tear_between_two_blocks(tmp_path):
    rows = [history(n, {"loss": n, "text": json.dumps("x" * 5000)}) for n in range(9)]
    path = written(tmp_path / "run-x.wandb", header(), *rows)
    path.write_bytes(path.read_bytes()[:BLOCK])  # the seventh row has begun
    log = read_one(path)
    assert values(log, "loss") == {n: n for n in range(6)}
    assert ["ends within a record" in note for note in log.notes] == [True]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
@example([(40000, 255)])
def test_flipped_bytes_lose_rows_and_invent_none(run, tmp_path, flips):
    data = bytearray(run.read_bytes())
    for place, bits in flips:
        data[place % len(data)] ^= bits
    path = tmp_path / "run-one.wandb"
    path.write_bytes(data)
    try:
        log = read_one(path)
    except InputError:
        assert data[: len(MAGIC)] != MAGIC
        return
    for name, truth in (("loss", lambda n: 1 / (n + 1)), ("a.b", lambda n: n)):
        found = values(log, name) if name in log.metrics else {}
        assert found == {n: truth(int(n)) for n in found}
    if bytes(data) != run.read_bytes():
        assert log.notes


def test_one_damaged_record_costs_one_row(run, tmp_path):
    data = bytearray(run.read_bytes())
    place = data.index(b"0.03125")  # the loss of row 31; its first place is in the summary
    place = data.index(b"0.03125", place + 1)
    data[place] ^= 1
    path = tmp_path / "run-one.wandb"
    path.write_bytes(data)
    log = read_one(path)
    assert set(values(log, "loss")) == set(range(60)) - {31}
    assert log.notes == ("run-one.wandb: 1 damaged place was passed over; rows are missing there",)


@settings(max_examples=200)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\x08\x01\x12", b"\x08\x01\x1a", b"\x12\x20\n\x1e\x12", b"\x2a"]),
)
@example(b"\x20\n\x1e\x12\xff\xff", b"\x08\x01\x12")
@example(b"\x12\n\x10\x12\x05_step\x82\x01\x051e999", b"\x08\x01\x12")
def test_records_that_are_no_messages(tmp_path, body, start):
    path = written(tmp_path / "run-x.wandb", header(), start + body, history(3, {"loss": 1}))
    assert read_one(path).metrics["loss"].value_N[-1] == 1


@pytest.mark.parametrize("unit", [b"\n\x0a", b"\n\x0a\n\x7fa", b"\n\x0a\n\x01a\x82\x01\x05" + b"1" * 200])
def test_a_record_that_is_hard_to_search_takes_no_longer_than_its_size(tmp_path, unit):
    """Of 600 KB, for which the square of its size would take an hour."""
    body = unit * (600_000 // len(unit))
    size = bytes([len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14])
    path = written(tmp_path / "run-x.wandb", header(), b"\x08\x01\x12" + size + body, history(1, {"m": 1}))
    with alarm(60):
        log = read_one(path)
    assert values(log, "m") == {1: 1}
    assert any("damaged" in note for note in log.notes)
