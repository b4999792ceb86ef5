import itertools
import math
import os
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest
from event_files import START, delimited, event, record
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings, strategies as st
from read_logs import read_logs

from scalerl import InputError, limits
from scalerl.ingest.formats.tensorboard import FORMAT, _masked_crc


@pytest.fixture(scope="module")
def writer():
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch.utils.tensorboard").SummaryWriter


def write(folder, *records, name="events.out.tfevents.1.host"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(records))
    return folder / name


def test_as_the_library_reads_it(tmp_path, writer):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with writer(tmp_path / "run") as log:
        for step in range(50):
            log.add_scalar("train/reward", math.sin(step), step, walltime=1.7e9 + step)
            log.add_scalar("new", math.sin(step), step * 10**10, new_style=True)
            log.add_scalar("double", 0.1 * step, step, new_style=True, double_precision=True)
            log.add_histogram("weights", np.arange(9.0), step)
        log.add_scalar("train/reward", float("nan"), 50)
        log.add_text("args", '{"learning_rate": 1e-6, "fsdp": {"x": 1}}')
        log.add_text("note", "no scalar")
        log.add_scalar("before", 1.0, -3)
    assert FORMAT.recognises(tmp_path)
    (log,) = read_logs(FORMAT, tmp_path, everything)
    assert log.name == "run"
    assert log.names == ("train/reward", "new", "double", "before")
    assert log.config == {"learning_rate": 1e-6, "fsdp.x": 1}
    assert log.notes == ("1 value left out, whose step is not a whole number of 0 or more",)
    assert "before" not in log.metrics
    np.testing.assert_array_equal(log.metrics["train/reward"].time_N, 1.7e9 + np.arange(50))
    np.testing.assert_array_equal(log.metrics["double"].value_N, 0.1 * np.arange(50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = accumulator.EventAccumulator(
            str(tmp_path / "run"), size_guidance={"scalars": 0, "tensors": 0}
        )
        events.Reload()
        theirs = events.Scalars("train/reward")[:-1]
        tensors = [one.tensor_proto.float_val[0] for one in events.Tensors("new")]
    np.testing.assert_array_equal(log.metrics["train/reward"].value_N, [one.value for one in theirs])
    np.testing.assert_array_equal(log.metrics["new"].value_N, np.array(tensors, dtype=np.float32))


def test_every_point_is_kept(tmp_path):
    body = event("r", 1, 0.5)
    step = body.index(b"\x10\x01") - 12

    def at(number):
        data = body[12:-4]
        return record(data[:step] + b"\x10" + bytes([number & 127 | 128, number >> 7]) + data[step + 2 :])

    write(tmp_path, START, *(at(number) for number in range(12_000)))
    (log,) = read_logs(FORMAT, tmp_path, everything)
    np.testing.assert_array_equal(log.metrics["r"].step_N, np.arange(12_000))


def test_restarts_and_folders(tmp_path, writer):
    for part in range(2):  # within one second, the whole ones of which are in the names
        with writer(tmp_path / "a", filename_suffix=str(9 - part)) as log:
            for step in range(part * 3, part * 3 + 5):
                log.add_scalar("reward", part, step)
    with writer(tmp_path / "b" / "deep") as log:
        log.add_scalar("reward", 7, 0)
        log.add_hparams({"lr": 1.0}, {"hparam/score": 1.0}, run_name="9")
    logs = read_logs(FORMAT, tmp_path, lambda name: name == "reward")
    assert [log.name for log in logs] == ["a", "b/deep"]  # b/deep/9 has hyperparameters alone
    run = logs[0].metrics["reward"]
    assert run.step_N.tolist() == list(range(8))
    assert run.value_N.tolist() == [0] * 3 + [1] * 5
    assert "the run was restarted at step 3" in logs[0].notes[0]
    assert "before for steps 3 to 4 is superseded" in logs[0].notes[0]
    (one,) = read_logs(FORMAT, tmp_path / "a", everything)
    assert one.name == "a"


def test_files_of_a_run_go_by_their_first_events(tmp_path):
    write(tmp_path, event("r", 0, 1.0, time=5e8), event("r", 1, 1.0, time=5.5e8), name="tfevents.z")
    write(tmp_path, event("r", 1, 2.0, time=6e8), name="tfevents.a")
    write(tmp_path, name="tfevents.0")  # a run that has just begun
    (log,) = read_logs(FORMAT, tmp_path, everything)
    assert log.metrics["r"].value_N.tolist() == [1, 2]
    assert log.metrics["r"].time_N.tolist() == [5e8, 6e8]


@pytest.mark.parametrize(
    ("tensor", "plugin", "expected"),
    [
        (b"\x08\x01\x12\x00" + delimited(4, struct.pack("<f", 0.5)), "scalars", 0.5),
        (b"\x08\x02" + delimited(4, struct.pack("<d", 0.1)), None, 0.1),
        (b"\x08\x01\x2d" + struct.pack("<f", 0.25), None, 0.25),
        (b"\x08\x01" + delimited(5, struct.pack("<f", 0.25)), None, 0.25),
        (b"\x08\x02" + delimited(6, struct.pack("<d", 0.1)), None, 0.1),
        (b"\x08\x01" + delimited(2, delimited(2, b"\x08\x01")) + b"\x2d" + struct.pack("<f", 2), None, 2),
        (b"\x08\x01" + delimited(2, delimited(2, b"\x08\x03")) + b"\x2d" + struct.pack("<f", 2), None, None),
        (b"\x08\x01" + delimited(5, struct.pack("<2f", 1, 2)), None, None),
        (b"\x08\x01\x2d" + struct.pack("<f", 2), "histograms", None),
        (b"\x08\x07" + delimited(8, b"text"), "text", None),
    ],
)
def test_tensors(tmp_path, tensor, plugin, expected):
    path = write(tmp_path, START, event("r", 1, tensor, plugin=plugin), event("s", 1, 1.0))
    (log,) = read_logs(FORMAT, path, everything)
    assert log.notes == ()
    found = log.metrics.get("r")
    assert (None if found is None else found.value_N.tolist()) == (None if expected is None else [expected])


def test_only_the_first_event_of_a_tag_names_its_plugin(tmp_path):
    tensor = b"\x08\x01\x2d" + struct.pack("<f", 2)
    write(tmp_path, event("r", 1, tensor, plugin="pr_curves"), event("r", 2, tensor), event("s", 2, tensor))
    (log,) = read_logs(FORMAT, tmp_path, everything)
    assert log.names == ("s",)


def test_a_torn_tail_is_left_out(tmp_path):
    whole = [START, event("r", 1, 1.0), event("r", 2, 2.0)]
    for cut in range(1, len(whole[-1])):
        path = write(tmp_path, *whole[:-1], whole[-1][:-cut])
        (log,) = read_logs(FORMAT, path, everything)
        assert log.metrics["r"].value_N.tolist() == [1]
        assert log.notes == (f"{path}: the last record is unfinished (a crash while writing); left out",)


def test_damage(tmp_path):
    middle = bytearray(event("r", 2, 2.0))
    middle[-6] ^= 1  # in the value: the checksum of the data tells
    path = write(tmp_path, START, event("r", 1, 1.0), bytes(middle), event("r", 3, 3.0))
    (log,) = read_logs(FORMAT, path, everything)
    assert log.metrics["r"].value_N.tolist() == [1, 3]
    assert log.notes == (f"{path}: 1 of 4 records are damaged; left out",)
    path = write(tmp_path, START, event("r", 1, 1.0), bytes(1000))  # zeros, as a crash of the machine leaves
    (log,) = read_logs(FORMAT, path, everything)
    at = len(START) + len(event("r", 1, 1.0))
    assert log.notes == (f"{path}: damaged from byte {at} on, of {at + 1000}; the rest is left out",)
    path = write(tmp_path / "x", bytes(1000))
    with pytest.raises(InputError, match="not an event file, or damaged from its first record on"):
        read_logs(FORMAT, path, everything)
    write(tmp_path / "x", event("r", 1, 1.0), name="tfevents.other")
    (log,) = read_logs(FORMAT, tmp_path / "x", everything)
    assert log.notes == (f"{path}: damaged from its first record on; left out",)


def test_large_records_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROW", replace(limits.ROW, most=100))
    path = write(tmp_path, START, record(bytes(101)), event("r", 1, 1.0))
    (log,) = read_logs(FORMAT, path, everything)
    assert log.names == ("r",)
    (note,) = log.notes
    assert note.endswith("1 record of more than 100 bytes passed over, with whatever metrics are in them")


def test_what_is_recognised(tmp_path):
    path = write(tmp_path / "a", START, name="renamed")
    assert FORMAT.recognises(path)
    assert not FORMAT.recognises(tmp_path)
    text = write(tmp_path / "b", b"step,loss\n1,2\n", name="log.csv")
    assert not FORMAT.recognises(text)
    assert not FORMAT.recognises(tmp_path / "missing")
    with pytest.raises(InputError, match="no event files in it"):
        read_logs(FORMAT, tmp_path, everything)
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    assert not FORMAT.recognises(fifo)


def test_links_are_not_followed(tmp_path):
    write(tmp_path / "outside", START, event("r", 1, 1.0))
    write(tmp_path / "runs" / "a", START, event("r", 1, 2.0))
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "a" / "tfevents.link").symlink_to(
        tmp_path / "outside" / "events.out.tfevents.1.host"
    )
    (log,) = read_logs(FORMAT, tmp_path / "runs", everything)
    assert log.metrics["r"].value_N.tolist() == [2]
    (log,) = read_logs(FORMAT, tmp_path / "runs" / "out", everything)  # which was asked for by name
    assert log.metrics["r"].value_N.tolist() == [1]


def test_checksum():
    assert _masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


TENSOR = b"\x08\x02" + delimited(2, delimited(2, b"\x08\x01")) + delimited(4, struct.pack("<d", 0.1))
SOUND = (
    START
    + event("r", 1, 0.5)
    + event("args/text_summary", 0, b"\x08\x07" + delimited(8, b'{"a": 1}'), plugin="text")
)
SOUND += event("s", 2, TENSOR, plugin="scalars") + event("r", 2, 0.25)


@settings(max_examples=300)
@given(data=damaged(SOUND))
def test_damaged_files(tmp_path, data):
    read_hostile(FORMAT, write(tmp_path, data))


@settings(max_examples=200)
@given(data=st.lists(damaged(SOUND[len(START) + 12 : -4]), max_size=3))
def test_damaged_messages_of_right_checksums(tmp_path, data):
    read_hostile(FORMAT, write(tmp_path, START, *map(record, data)))


def test_numbers_are_those_of_the_steps(tmp_path):
    records = itertools.chain.from_iterable(
        [event("a", step, float(step)), event("b", step, -float(step))] for step in range(100)
    )
    write(tmp_path, START, *records)
    (log,) = read_logs(FORMAT, tmp_path, lambda name: name == "b")
    assert log.names == ("a", "b")
    assert list(log.metrics) == ["b"]
    assert log.metrics["b"].value_N.tolist() == [-float(step) for step in range(100)]
