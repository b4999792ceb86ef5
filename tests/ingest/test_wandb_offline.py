import io
import json
import math
import os
import random
import shutil
import struct
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from wandb.proto import wandb_internal_pb2

from scalerl import InputError
from scalerl.ingest.wandb_offline import FORMAT

pb: Any = wandb_internal_pb2  # its messages are made when it is imported
MAGIC = b":W&B\xe1\xbe\x00"
BLOCK = 32768


def everything(name):
    return True


def read_one(path, wanted=everything):
    (log,) = FORMAT.read(path, wanted)
    return log


def values(log, name):
    return dict(zip(log.metrics[name].step_N.tolist(), log.metrics[name].value_N.tolist(), strict=True))


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Writes runs with W&B's own library, which may reach nothing outside: a function of folder and rows."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(home))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")

        def log(folder, rows, steps=None, **options):
            quiet = wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            )
            folder.mkdir(exist_ok=True)
            run = wandb.init(dir=folder, mode="offline", project="p", settings=quiet, **options)
            for n, row in enumerate(rows):
                run.log(row, step=None if steps is None else steps[n])
            run.finish()
            path = max((folder / "wandb").glob(f"*-{run.id}/*.wandb"))
            limit = time.monotonic() + 30
            while not is_whole(path) and time.monotonic() < limit:
                time.sleep(0.01)  # the file is written by another process, which finish() does not wait for
            return path

        yield log
        wandb.teardown()


@pytest.fixture(scope="module")
def run(logged, tmp_path_factory):
    """A file of some blocks: 60 rows of a loss, of nested values and of long texts."""
    rows = [{"loss": 1 / (n + 1), "a": {"b": n, "c": {"d": -n}}, "text": "x" * 1500} for n in range(60)]
    return logged(tmp_path_factory.mktemp("run"), rows, id="one", name="a name", config={"lr": 0.1})


def is_whole(path):
    """Whether the record of the exit has been written."""
    data = path.read_bytes()
    at, record, last = len(MAGIC), b"", pb.Record()
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):
            last.ParseFromString(record)
            record = b""
            if last.HasField("exit"):
                return True
    return False


def framed(records):
    """Records as W&B writes them."""
    out = io.BytesIO()
    out.write(MAGIC)
    place = len(MAGIC)
    for record in records:
        first = True
        while True:
            room = BLOCK - place % BLOCK
            if room < 7:
                out.write(bytes(room))
                place, room = place + room, BLOCK
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            crc = zlib.crc32(bytes([kind]) + part)
            out.write(struct.pack("<IHB", crc, len(part), kind) + part)
            place += 7 + len(part)
            first = False
            if not record:
                break
    return out.getvalue()


def history(n, row, **more):
    """A record of a row, as W&B makes it."""
    record = pb.Record(num=n + 3)
    for key, value in {**row, "_step": n, "_timestamp": 1.7e9 + n, "_runtime": n / 10, **more}.items():
        item = record.history.item.add()
        item.nested_key.append(key)
        item.value_json = value if isinstance(value, str) else json.dumps(value)
    record.history.step.num = n
    return record.SerializeToString()


def header(run_id="made", **more):
    run = pb.Record(num=2)
    run.run.run_id, run.run.start_time.seconds = run_id, 1_700_000_000
    for key, value in more.items():
        run.run.config.update.add(key=key, value_json=json.dumps(value))
    return run.SerializeToString()


def written(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(records))
    return path


def test_values_names_times_and_config(run):
    log = read_one(run)
    assert (log.format, log.name, log.source, log.notes) == ("wandb", "a name", str(run), ())
    assert values(log, "loss") == {n: 1 / (n + 1) for n in range(60)}
    assert values(log, "a.b") == {n: n for n in range(60)}
    assert values(log, "a.c.d") == {n: -n for n in range(60)}
    assert set(log.names) == set(log.metrics) == {"loss", "a.b", "a.c.d"}
    assert log.config == {"lr": 0.1}
    time_N = log.metrics["loss"].time_N
    assert (np.diff(time_N) >= 0).all()
    assert abs(time_N[0] - run.stat().st_mtime) < 600


def test_only_what_is_wanted_is_kept_and_all_is_named(run):
    log = read_one(run, lambda name: name == "a.b")
    assert list(log.metrics) == ["a.b"]
    assert set(log.names) == {"loss", "a.b", "a.c.d"}


def test_what_is_no_finite_number_is_passed_over(logged, tmp_path):
    row = {
        **{"nan": math.nan, "inf": math.inf, "less": -math.inf, "text": "1.5", "none": None, "true": True},
        **{
            "list": [1, 2],
            "array": np.arange(3),
            "single": np.float32(0.1),
            "whole": np.int64(7),
            "big": 2**60,
        },
        **{"histogram": wandb.Histogram([1.0, 2.0, 4.0]), "table": wandb.Table(columns=["a"], data=[[1]])},
        "image": wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8)),
        "in": {"image": wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8)), "number": 3},
        "é - 试\u2028 \t": 1.25,
        "long" * 60: 2.5,
    }
    log = read_one(logged(tmp_path, [row, row, {"loss": 1}]))
    found = {name: list(series.value_N) for name, series in log.metrics.items()}
    assert found == {
        **{
            "single": [float(np.float32(0.1))] * 2,
            "whole": [7] * 2,
            "big": [2.0**60] * 2,
            "in.number": [3] * 2,
        },
        **{"é - 试\u2028 \t": [1.25] * 2, "long" * 60: [2.5] * 2, "loss": [1]},
    }
    assert set(log.names) == set(found)
    assert log.notes == ()


def test_config_as_it_is_at_the_end(logged, tmp_path):
    config = {"a": 1, "model": {"path": "Qwen/x", "deep": {"er": [1, 2]}}, "none": None}
    log = read_one(logged(tmp_path, [{"x": 1}], config=config))
    assert log.config == {"a": 1, "model.path": "Qwen/x", "model.deep.er": [1, 2], "none": None}
    removed = pb.Record()
    removed.config.remove.add(key="b")
    removed.config.update.add(nested_key=["c", "d"], value_json="2")
    removed.config.update.add(nested_key=["_wandb", "x"], value_json="2")
    path = written(
        tmp_path / "run-x.wandb", header(b=1, c={"e": 3}), removed.SerializeToString(), history(0, {"m": 1})
    )
    assert read_one(path).config == {"c.e": 3, "c.d": 2}


@pytest.mark.parametrize(
    "name", ["global_step", "train/global_step", "trainer/global_step", "training_step", "step"]
)
def test_the_trainers_own_steps_are_preferred(logged, tmp_path, name):
    rows = [{"before": 1}]  # an evaluation before the first step
    for n in range(1, 9):
        rows += [{"loss": n, name: 5 * n}, {"eval": n}]
    log = read_one(logged(tmp_path, rows))
    assert values(log, "loss") == values(log, "eval") == {5 * n: n for n in range(1, 9)}
    assert values(log, "before") == {0: 1}
    assert log.notes == (
        f"the step is '{name}', and not W&B's count of calls; 9 rows without it are at the one before them",
    )


@pytest.mark.parametrize(
    "rows",
    [
        [{"loss": n, "step": n % 10} for n in range(40)],  # of an epoch
        [{"loss": n} | ({"global_step": n} if n % 10 == 0 else {}) for n in range(40)],  # in few rows
        [{"loss": n, "step": n + 0.5} for n in range(40)],
        [{"loss": n, "env_step": 100 * n} for n in range(40)],
    ],
)
def test_a_count_that_does_not_go_with_the_rows_is_none_of_steps(logged, tmp_path, rows):
    log = read_one(logged(tmp_path, rows))
    assert values(log, "loss") == {n: n for n in range(40)}
    assert log.notes == ()


def test_two_counts_of_one_trainer_are_one(logged, tmp_path):
    rows = []
    for n in range(1, 6):
        rows += [{"train/loss": n, "train/global_step": n}, {"eval/acc": n, "eval/global_step": n}]
    log = read_one(logged(tmp_path, rows))
    assert values(log, "train/loss") == values(log, "eval/acc") == {n: n for n in range(1, 6)}


def test_the_count_of_steps_need_not_be_wanted(logged, tmp_path):
    rows = [{"loss": n, "more": 1, "train/global_step": 10 * n} for n in range(5)]
    log = read_one(logged(tmp_path, rows), lambda name: name == "loss")
    assert list(log.metrics) == ["loss"]
    assert values(log, "loss") == {10 * n: n for n in range(5)}
    assert set(log.names) == {"loss", "more", "train/global_step"}


def test_steps_that_the_trainer_gave(logged, tmp_path):
    log = read_one(logged(tmp_path, [{"loss": n} for n in range(5)], steps=[0, 10, 20, 35, 50]))
    assert values(log, "loss") == {0: 0, 10: 1, 20: 2, 35: 3, 50: 4}


def resumed(logged, folder, *parts):
    """A run of several folders."""
    for n, (rows, steps) in enumerate(parts):
        if n:
            time.sleep(1.1)  # the folders are named by the second
        logged(folder, rows, steps, id="same", resume="allow", config={"part": n, f"only{n}": n})
    return folder


def test_a_resumed_run_is_one(logged, tmp_path):
    first = [{"loss": n, "train/global_step": n} for n in range(10)]
    second = [{"loss": 100 + n, "train/global_step": n} for n in range(7, 12)]
    log = read_one(resumed(logged, tmp_path, (first, None), (second, None)))
    assert values(log, "loss") == {n: n for n in range(7)} | {n: 100 + n for n in range(7, 12)}
    assert log.config == {"part": 1, "only0": 0, "only1": 1}
    assert any("restarted from an earlier step" in note for note in log.notes)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    folders[0].rename(tmp_path / "wandb" / "run-zz")  # the order is that of time, not of names
    assert values(read_one(tmp_path), "loss") == values(log, "loss")


def test_a_resumed_run_that_counts_anew(logged, tmp_path):
    rows = [{"loss": n} for n in range(4)]
    log = read_one(resumed(logged, tmp_path, (rows, None), (rows, None)))
    assert values(log, "loss") == {n: n % 4 for n in range(8)}
    assert log.notes == ("the resumed run counts from 0 again: its rows were put after step 3",)


def test_a_resumed_run_whose_trainer_gives_the_steps(logged, tmp_path):
    rows = [{"loss": n} for n in range(4)]
    log = read_one(resumed(logged, tmp_path, (rows, [0, 5, 10, 15]), (rows, [0, 5, 7, 9])))
    assert values(log, "loss") == {0: 0, 5: 1, 7: 2, 9: 3}


def test_folders_hold_each_run_once(logged, tmp_path):
    paths = [logged(tmp_path, [{"loss": n}], id=f"run{n}", name=f"name {n}") for n in range(3)]
    wandb_folder = tmp_path / "wandb"
    assert (wandb_folder / "latest-run").is_symlink()
    (wandb_folder / "run-loop").symlink_to(wandb_folder)
    (wandb_folder / "wandb").symlink_to(wandb_folder)
    (wandb_folder / "run-itself").symlink_to("run-itself")
    (wandb_folder / "run-gone").symlink_to("nowhere")
    (wandb_folder / "run-empty").mkdir()
    for folder in (tmp_path, wandb_folder):
        assert FORMAT.recognises(folder)
        logs = FORMAT.read(folder, everything)
        assert [(log.name, values(log, "loss")) for log in logs] == [(f"name {n}", {0: n}) for n in range(3)]
        assert [log.source for log in logs] == [
            str(folder / path.relative_to(tmp_path if folder == tmp_path else wandb_folder)) for path in paths
        ]
    for path in (paths[1], paths[1].parent):
        assert FORMAT.recognises(path)
        assert read_one(path).name == "name 1"
    assert read_one(wandb_folder / "latest-run").name == "name 2"


def test_a_broken_run_does_not_hide_the_others(logged, tmp_path):
    logged(tmp_path, [{"loss": 1}], id="good")
    broken = tmp_path / "wandb" / "run-20200101_000000-bad" / "run-bad.wandb"
    broken.parent.mkdir()
    broken.touch()
    log = read_one(tmp_path)
    assert values(log, "loss") == {0: 1}
    (note,) = log.notes
    assert note.startswith(f"passed over: {broken}: the file is empty")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty"),
        (MAGIC[:5], "ends after 5 bytes"),
        (b"step,loss\n1,2\n", "not a file of W&B, it begins with b'step,lo'"),
        (MAGIC[:6] + b"\x01", "of a version that is not known"),
        (bytes(40000), "not a file of W&B"),
    ],
)
def test_files_that_are_none(tmp_path, data, why):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    with pytest.raises(InputError) as raised:
        FORMAT.read(path, everything)
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
        FORMAT.read(tmp_path, everything)


def test_a_file_with_no_rows(logged, tmp_path):
    log = read_one(logged(tmp_path, []))
    assert (log.metrics, log.names, log.notes) == ({}, (), ("no numbers were logged",))


def test_the_summary_stands_in_where_there_is_no_history(tmp_path):
    record = pb.Record(num=3)
    for key, value in {"acc": 0.5, "_step": 70, "_timestamp": 1.7e9, "text": "a"}.items():
        record.summary.update.add(nested_key=[key], value_json=json.dumps(value))
    path = written(tmp_path / "run-x.wandb", header(), record.SerializeToString())
    log = read_one(path)
    assert values(log, "acc") == {70: 0.5}
    assert list(log.metrics["acc"].time_N) == [1.7e9]
    assert log.notes == ("run-x.wandb has no history, only a summary: one value of each metric",)
    written(path, header(), record.SerializeToString(), history(0, {"loss": 1}))
    assert set(read_one(path).metrics) == {"loss"}


def test_values_nested_in_one_piece_as_older_versions_have_them(tmp_path):
    record = pb.Record(num=3)
    media = {"_type": "histogram", "packed": 3}
    for key, value in {
        "n": {"x": 1, "y": {"z": 2.5, "h": media}},
        "h": media,
        "loss": 3,
        "_runtime": 5,
    }.items():
        record.history.item.add(key=key, value_json=json.dumps(value))
    record.history.step.num = 12
    log = read_one(written(tmp_path / "run-x.wandb", header(), record.SerializeToString()))
    assert {name: values(log, name) for name in log.names} == {
        "n.x": {12: 1},
        "n.y.z": {12: 2.5},
        "loss": {12: 3},
    }
    assert list(log.metrics["loss"].time_N) == [1_700_000_005]


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\x08\x01\x12", b"\x08\x01\x1a", b"\x12\x20\n\x1e\x12", b"\x2a"]),
)
@example(b"\x20\n\x1e\x12\xff\xff", b"\x08\x01\x12")
@example(b"\x12\n\x10\x12\x05_step\x82\x01\x051e999", b"\x08\x01\x12")
def test_records_that_are_no_messages(tmp_path, body, start):
    path = written(tmp_path / "run-x.wandb", header(), start + body, history(3, {"loss": 1}))
    assert read_one(path).metrics["loss"].value_N[-1] == 1


def test_many_names_are_bounded(tmp_path):
    rows = [history(n, {f"m{n}-{k}": k for k in range(300)} | {"loss": n}) for n in range(60)]
    log = read_one(written(tmp_path / "run-x.wandb", header(), *rows), lambda name: name == "loss")
    assert len(log.names) <= 5001
    assert len(log.metrics["loss"]) == 60


def test_a_long_file_takes_little_memory(tmp_path, capsys):
    row = history(0, {f"metric/{k}": 1 / 7 + k for k in range(10)}, _step=1234567)
    rows = (row.replace(b"1234567", b"%d" % (1_000_000 + n)) for n in range(100_000))
    path = written(tmp_path / "run-long.wandb", header(), *rows)
    start = time.process_time()
    log = read_one(path)
    speed = len(log.metrics["metric/3"]) / (time.process_time() - start)
    with capsys.disabled():
        print(f" {speed:.0f} rows/s ", end="")
    tracemalloc.start()
    try:
        log = read_one(path, lambda name: name == "metric/3")
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(log.metrics["metric/3"].step_N, 1_000_000 + np.arange(100_000))
    assert len(log.names) == 10
    assert path.stat().st_size / 2**20 > 35
    assert peak < 25  # MiB: three numbers a row, of 32 bytes each until they are arrays
