import sys
from datetime import UTC, datetime, timedelta

import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings, strategies as st
from read_logs import read_logs

from scalerl import InputError, load_run
from scalerl.ingest.formats.parquet import FORMAT

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
START = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


def write(path, columns, **options):
    parquet.write_table(
        columns if isinstance(columns, arrow.Table) else arrow.table(columns), path, **options
    )
    return path


def columns(rows=10):
    return {
        "step": list(range(rows)),
        "train/reward": [0.1 * n if n % 2 else None for n in range(rows)],
        "loss": [float("nan")] + [1.0] * (rows - 1),
        "text": ["x"] * rows,
        "eval": [{"aime": 0.5, "deep": {"x": n}} for n in range(rows)],
        "_timestamp": [1.7e9 + n for n in range(rows)],
    }


def test_columns(tmp_path):
    path = write(tmp_path / "one.parquet", columns(), row_group_size=3)
    assert FORMAT.recognises(path)
    (log,) = read_logs(FORMAT, path, everything)
    assert log.name == "one"
    assert set(log.names) == {"train/reward", "loss", "eval/aime", "eval/deep/x"}
    assert log.metrics["train/reward"].step_N.tolist() == [1, 3, 5, 7, 9]
    assert log.metrics["train/reward"].time_N.tolist() == [1.7e9 + n for n in (1, 3, 5, 7, 9)]
    assert log.metrics["eval/deep/x"].value_N.tolist() == list(range(10))
    (log,) = read_logs(FORMAT, path, lambda name: name == "loss")
    assert list(log.metrics) == ["loss"]
    assert "train/reward" in log.names


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "+02:00"])
def test_time_stamps(tmp_path, unit, zone):
    times = [START + timedelta(seconds=n) for n in range(3)]
    if zone is None:
        times = [time.replace(tzinfo=None) for time in times]
    table = {"step": [0, 1, 2], "a": [1, 2, 3], "timestamp": arrow.array(times, arrow.timestamp(unit, zone))}
    (log,) = read_logs(FORMAT, write(tmp_path / "x.parquet", table), everything)
    assert log.metrics["a"].time_N.tolist() == [1.7e9, 1.7e9 + 1, 1.7e9 + 2]


def test_dots_in_names_and_small_floats(tmp_path):
    table = {"step": [0, 1], "a.b": [1.0, 2.0], "a": [3, 4], "h": arrow.array([0.5, 1.5], arrow.float16())}
    (log,) = read_logs(FORMAT, write(tmp_path / "x.parquet", table), everything)
    assert log.metrics["a.b"].value_N.tolist() == [1, 2]
    assert log.metrics["a"].value_N.tolist() == [3, 4]
    assert log.metrics["h"].value_N.tolist() == [0.5, 1.5]


def test_text_within_a_struct_is_not_read(tmp_path):
    halves = arrow.array([0.5] * 99, arrow.float16())
    fields = {"said": ["x" * 2**20] * 99, "n": list(range(99)), "half": halves, "list": [[1, 2]] * 99}
    struct = arrow.StructArray.from_arrays([arrow.array(values) for values in fields.values()], list(fields))
    path = write(tmp_path / "x.parquet", {"step": list(range(99)), "data": struct})
    assert path.stat().st_size < 2**21  # a dictionary holds the text once
    before = arrow.default_memory_pool()
    pool = arrow.proxy_memory_pool(before)
    arrow.set_memory_pool(pool)
    try:
        (log,) = read_logs(FORMAT, path, everything)
    finally:
        arrow.set_memory_pool(before)
    assert set(log.names) == {"data/n", "data/half"}
    assert log.metrics["data/n"].value_N.tolist() == list(range(99))
    assert 0 < pool.max_memory() < 2**21


def test_several_runs(tmp_path):
    table = {"step": [0, 0, 1, 1], "run_name": ["a", "b"] * 2, "r": [1, 2, 3, 4]}
    logs = read_logs(FORMAT, write(tmp_path / "x.parquet", table), everything)
    assert [(log.name, log.metrics["r"].value_N.tolist()) for log in logs] == [("a", [1, 3]), ("b", [2, 4])]


def test_rows_of_several_data_sets_are_reported(tmp_path):
    table = {"step": [n // 2 for n in range(16)], "eval/acc": [0.1 + n / 99 for n in range(16)]}
    for name, sets in {"text": ["aime", "math"] * 8, "seed": [1, 2] * 8}.items():
        column = {"seed": sets} if name == "seed" else {"dataset": arrow.array(sets).dictionary_encode()}
        run = load_run(write(tmp_path / f"{name}.parquet", table | column))
        assert any(text.startswith("rows of 'eval/acc' of ") for text in run.warnings)


def test_a_metric_a_row(tmp_path):
    table = {"step": [0, 0, 1, 1], "metric": ["eval/acc", "loss"] * 2, "value": [0.25, 2.0, 0.5, 1.0]}
    path = write(tmp_path / "melted.parquet", table)
    (log,) = read_logs(FORMAT, path, lambda name: name == "eval/acc")
    assert {name: one.value_N.tolist() for name, one in log.metrics.items()} == {"eval/acc": [0.25, 0.5]}


def test_errors(tmp_path):
    path = tmp_path / "x.parquet"
    with pytest.raises(InputError, match=r"no column of steps, step, training_step, .*; columns: a, b"):
        read_logs(FORMAT, write(path, {"a": [1], "b": [2]}), everything)
    with pytest.raises(InputError, match="no row has a step"):
        read_logs(FORMAT, write(path, {"step": ["x"], "b": [2]}), everything)
    twice = arrow.table([arrow.array([1])] * 2, names=["step", "step"])
    with pytest.raises(InputError, match="two columns have one name"):
        read_logs(FORMAT, write(path, twice), everything)
    path.write_bytes(b"PAR1")
    assert FORMAT.recognises(path)
    with pytest.raises(InputError, match="not Parquet, or damaged"):
        read_logs(FORMAT, path, everything)
    path.write_bytes(b"step\n1\n")
    assert not FORMAT.recognises(path)
    assert not FORMAT.recognises(tmp_path)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", columns())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert FORMAT.recognises(path)
    with pytest.raises(InputError, match=r"Parquet needs pyarrow: pip install 'scalerl\[data\]'"):
        read_logs(FORMAT, path, everything)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("parquet") / "x.parquet", columns(), compression="none").read_bytes()


# With the same files every time: pyarrow itself crashes on some, about one in 3,000.
@settings(max_examples=200)
@given(data=st.data())
def test_damaged_files(tmp_path, sound, data):
    path = tmp_path / "x.parquet"
    path.write_bytes(data.draw(damaged(sound)))
    read_hostile(FORMAT, path)
