"""Whatever it is given, a fit answers with numbers, or says in one line why it does not."""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from scalerl.cli.main import main
from scalerl.curve import Points, fit
from scalerl.errors import ScalerlError

SLOW = 10.0
"""Seconds after which one example counts as a hang; it takes a fraction of one."""
FEW = settings(max_examples=60)
MANY = settings(max_examples=150)

unit = st.floats(0, 1)
any_float = st.floats(width=64)


def computes(n: int) -> st.SearchStrategy[list[float]]:
    """Evenly spaced, geometric, repeated, all at 0, almost equal or far apart; at any scale."""
    shape = st.one_of(
        st.just(np.linspace(0, 1, n)),
        st.just(np.linspace(1 / n, 1, n)),
        st.just(np.geomspace(1e-9, 1, n)),
        st.just(1 + 1e-13 * np.arange(n)),
        st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0]), min_size=n, max_size=n).map(np.sort),
        st.lists(st.floats(-290, 0), min_size=n, max_size=n).map(lambda e: 10.0 ** np.sort(e)),
        st.just(np.zeros(n)),
    )
    scale = st.one_of(st.sampled_from([1.0, 1e25, 1e300]), st.floats(-290, 290).map(lambda e: 10.0**e))
    scaled = st.tuples(shape, scale).map(lambda drawn: drawn[0] * drawn[1])
    return scaled.map(lambda c_N: np.where(c_N < 1e-300, 0.0, c_N).tolist())


def pass_rates(n: int) -> st.SearchStrategy[list[float]]:
    """Rising curves mostly, of any smoothness; constants, two values, 0 and 1."""
    index = np.arange(n)
    sigmoid = st.tuples(st.floats(0.01, 0.5), st.floats(0, 0.5), st.floats(0.2, 20)).map(
        lambda v: (v[1] + v[0] / (1 + np.exp(-(index - n / 2) / v[2]))).tolist()
    )
    return st.one_of(
        sigmoid,
        sigmoid,
        st.lists(unit, min_size=n, max_size=n).map(sorted),
        st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n).map(sorted),
        st.tuples(unit, unit, st.integers(1, n)).map(
            lambda v: np.where(index < v[2], *sorted(v[:2])).tolist()
        ),
        st.lists(unit, min_size=n, max_size=n),
        unit.map(lambda value: [value] * n),
    )


def steps(n: int) -> st.SearchStrategy[list[float] | None]:
    """None, in order, all the same, reversed and negative, or in any order."""
    return st.one_of(
        st.none(),
        st.just([float(i) for i in range(n)]),
        st.just([0.0] * n),
        st.just([float(-10 * i) for i in range(n)]),
        st.lists(st.integers(-5, 5).map(float), min_size=n, max_size=n),
    )


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Points that are sound one by one, however odd they are together."""
    n = draw(st.integers(5, 40))
    return {
        "compute": draw(computes(n)),
        "pass_rate": draw(pass_rates(n)),
        "noise_sd": draw(st.sampled_from([None, None, 0.0, 1e-9, 0.003, 0.01, 0.5])),
        "samples": draw(st.sampled_from([None, 1, 16_000])),
        "step": draw(steps(n)),
    }


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, Any]:
    """The same with one entry that may be any number."""
    columns = draw(arrays())
    name = draw(st.sampled_from(sorted(columns)))
    values = columns[name]
    if not isinstance(values, list):
        return {**columns, name: draw(any_float)}
    place = draw(st.integers(0, len(values) - 1))
    return {**columns, name: [*values[:place], draw(any_float), *values[place + 1 :]]}


questions = st.fixed_dictionaries(
    {
        "r0": st.sampled_from([None, None, None, "free", 0.0, 0.2, 1.0]),
        "level": st.sampled_from([0.95, 0.95, 0.5, 1e-9, 0.999999]),
        "min_compute": st.sampled_from([0.0, 0.0, 0.0, 1e-3, 1e30]),
    }
)
amounts = st.one_of(st.sampled_from([0.0, 1.0, 1e308, 5e-324]), st.floats(0, allow_infinity=False))


@FEW
@given(st.one_of(arrays(), arrays(), spoilt()), questions, st.lists(amounts, max_size=4), unit, amounts)
def test_any_points(columns, question, at, target, budget):
    start = time.monotonic()
    with contextlib.suppress(ScalerlError):
        found = fit(Points.from_arrays(**columns), **question)
        assert str(found)
        check_answer(found.to_json(at, target, budget))
    assert time.monotonic() - start < SLOW


def check_answer(answer: dict[str, Any]) -> None:
    assert not [(path, value) for path, value in numbers_in(answer) if not math.isfinite(value)]
    intervals, median = answer["intervals"], answer["median"]
    ceilings = () if answer["lack_of_fit"] else ("A", "A_given_family")
    for name in ceilings:
        assert_within(0.0, *intervals[name], 1.0)
    for name in (*ceilings, "B", "C_mid"):
        low, high = intervals[name]
        assert_within(low, median[name], high)
    for forecast in answer["forecast"]:
        assert_within(0.0, *forecast["interval"], 1.0)
        assert_within(0.0, *forecast["prediction"], 1.0)
        assert_within(0.0, *forecast["rerun"], 1.0)
        for name in ("median", "paper_point"):
            assert_within(0.0, forecast[name], 1.0)
    assert sum(answer["families"].values()) == pytest.approx(1)
    assert_within(0.0, answer["target"]["probability"], 1.0)
    low, high = answer["target"]["compute_to_target"]
    assert low is None or high is None or low <= high


def assert_within(*rising: float) -> None:
    """The numbers rise, to the rounding of a quantile."""
    for low, high in itertools.pairwise(rising):
        assert low <= high + 1e-9 * max(abs(high), 1e-6), rising


def numbers_in(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from numbers_in(inner, f"{path}[{i}]")
    elif isinstance(value, int | float):
        yield path, value


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command answers, or ends with its status and one line."""
    start = time.monotonic()
    status = main(arguments)
    out, err = capsys.readouterr()
    assert status in (0, 2, 3)
    if status == 0:
        check_answer(json.loads(out, parse_constant=pytest.fail))
    else:
        assert out == ""
        assert err.startswith("scalerl: ")
        assert err.count("\n") == 1
        assert err.rstrip("\n").isprintable()
        assert len(err) < 3000
    assert time.monotonic() - start < SLOW


ASK = ["--json", "--at", "0,1e9", "--target", "0.5", "--budget", "1e6"]

cells = st.one_of(
    st.sampled_from(["", " ", "0", "1", "-1", "nan", "inf", "61.0%", "1,500", "1e400", "x", '"', "\x00"]),
    st.floats().map(repr),
    st.text(max_size=5),
)
names = st.sampled_from(
    ["gpu_hours", "pass_rate", "step", "n_samples", "n_prompts", "mean_p_1mp", "loss", ""]
)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """A sound table with further columns, of which cells and line ends may be anything."""
    more = draw(st.lists(names, max_size=2))
    rows = [[f"{100 * i}", f"{0.2 + 0.4 * i / (i + 4):.4f}", *["1"] * len(more)] for i in range(12)]
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.sampled_from(rows))
        row[draw(st.integers(0, len(row) - 1))] = draw(cells)
    delimiter, end = draw(st.sampled_from(",;\t")), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    return end.join(delimiter.join(row) for row in [["gpu_hours", "pass_rate", *more], *rows])


files = st.one_of(
    st.binary(max_size=400),
    st.text(max_size=400).map(str.encode),
    tables().map(str.encode),
    tables().map(str.encode),
    tables().map(lambda text: text.encode("utf-16")),
    st.binary(max_size=50).map(lambda tail: b"gpu_hours,pass_rate\n" + tail),
    st.binary(max_size=50).map(lambda tail: b'{"gpu_hours": 1, "pass_rate": ' + tail),
)


@MANY
@given(files)
def test_any_bytes_as_a_file(tmp_path, capsys, data):
    file = tmp_path / "log"
    file.write_bytes(data)
    run(["fit", str(file), *ASK], capsys)


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(),
        st.integers(),
        st.just(10**400),
        st.text(max_size=5),
        st.just("1"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = ("time", "version", "samples", "prompts", "n_prompts", "n_samples", "mean_p_1mp", "entropy", "flops")
counters = st.one_of(
    anything, st.dictionaries(st.sampled_from(["generate", "train", "idle", "x"]), anything, max_size=4)
)


@st.composite
def evaluations(draw: st.DrawFn) -> list[Any]:
    """Rows of a run that is sound, but for what is spoilt in a few of them."""
    seconds = ("generate", "train", "idle")
    rows: list[Any] = [
        {"step": i, "pass_rate": 0.2 + 0.4 * i / (i + 4), "device_seconds": dict.fromkeys(seconds, 60.0 * i)}
        for i in range(draw(st.sampled_from([0, 1, 12])))
    ]
    for row in draw(st.lists(st.sampled_from(rows), max_size=2)) if rows else []:
        name = draw(st.sampled_from(["step", "pass_rate", "device_seconds", *FIELDS]))
        row[name] = draw(counters if name in ("device_seconds", "flops") else anything)
    return [*rows, *draw(st.lists(anything, max_size=1))] if draw(st.integers(0, 4)) == 0 else rows


@MANY
@given(evaluations(), st.sampled_from([None, {}, {"budget": {"kind": "steps"}}]), st.booleans())
def test_any_rows_as_evaluations(tmp_path, capsys, rows, config, cut):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "evals.jsonl").write_text(lines[: len(lines) - 4 * cut])
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    run(["fit", str(tmp_path), *ASK], capsys)
    run(["fit", str(tmp_path / "evals.jsonl"), *ASK], capsys)
