import json
import os

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve, Points
from scalerl.forecast.backtest import backtest
from scalerl.forecast.backtest_result import OURS
from scalerl.forecast.bank import Bank
from scalerl.forecast.rivals import BANK_RIVALS, normal

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 20.0, 0.40)


def a_run(seed=0, n=25, end=None, source="run"):
    compute_N = np.arange(n, dtype=float)
    y_N = TRUTH(compute_N) + np.random.default_rng(seed).normal(0, 0.004, n)
    if end is not None:
        y_N[-1] = end
    return Points.from_arrays(compute_N, y_N, source=source)


def half(seen, compute_K, at_Q):
    """An evaluation is N(.5, .01^2), whatever was seen."""
    return normal(np.full(len(compute_K), 0.5), np.full(len(compute_K), 0.01), at_Q)


def test_a_row_by_hand():
    """Ends at .5 and .6. The interval is .5 +- .0196: it holds the first, and misses the second by .0804."""
    runs = [a_run(0, end=0.5), a_run(1, end=0.6)]
    ours, row = Bank(backtest(runs, fractions=[0.5], rivals={"half": half})).rows(0.5)
    assert ours.method == OURS
    assert (row.method, row.runs, row.refused) == ("half", 2, {})
    assert row.error == pytest.approx(0.05)
    assert row.coverage == 0.5
    assert row.width == pytest.approx(0.0391993, abs=1e-6)
    assert row.score == pytest.approx(0.0391993 + 40 * 0.0804004 / 2, abs=1e-5)
    # .2336950 sd at the mean, and for an outcome 10 sd away the distance less sd / sqrt(pi).
    assert row.crps == pytest.approx((0.0023370 + 0.1 - 0.0056419) / 2, abs=2e-5)
    # Of .5, .45 is a go and .55 a no-go; of .6, .55 and .65 are no-gos, and the first of them is wrong.
    assert (row.right, row.wrong) == (3, 1)


def test_a_fit_calls_what_its_forecast_allows():
    runs = [a_run(seed, source=f"{seed}") for seed in range(3)]
    test = backtest(runs, fractions=[0.5], rivals=BANK_RIVALS)
    assert {cut.outcome for cut in test.cuts} == {"too early"}
    ours = Bank(test).rows(0.5)[0]
    assert ours.runs == 3
    assert ours.wrong == 0
    assert 0 < ours.right <= 6
    assert Bank(test).missed(0.5) == (0, 0)
    late = backtest([Points.from_arrays(10 * r.compute_N, TRUTH(10 * r.compute_N)) for r in runs[:1]])
    assert Bank(late).missed(0.75) == (1, 0)


def test_a_run_that_the_fit_refuses_is_counted_and_left_to_the_rivals():
    few = Points.from_arrays(np.arange(6.0), np.linspace(0.3, 0.5, 6), source="few")
    bank = Bank(
        backtest([a_run(0, source="a"), a_run(1, source="b"), few], fractions=[0.5], rivals=BANK_RIVALS)
    )
    rows = {row.method: row for row in bank.rows(0.5)}
    (why,) = rows[OURS].refused
    assert (rows[OURS].runs, rows[OURS].refused[why]) == (2, 1)
    assert why.startswith("too few evaluations")
    assert rows["random walk"].runs == rows["last value, other runs"].runs == 3
    assert {row.runs for row in bank.rows(0.5, answered=True)} == {2}
    text = str(bank)
    assert "of the 2 with scalerl" in text
    assert "1 x scalerl cannot answer: too few evaluations" in text
    json.dumps(bank.to_json(), allow_nan=False)


def put(path, run):
    rows = [f"{c},{y}" for c, y in zip(run.compute_N, run.pass_rate_N, strict=True)]
    path.write_text("\n".join(["gpu_hours,pass_rate", *rows]))


def test_the_command_reads_what_is_in_a_folder(tmp_path, capsys):
    put(tmp_path / "a.csv", a_run(0, n=12))
    put(tmp_path / "b.csv", a_run(1, n=12))
    (tmp_path / "notes.md").write_text("# Notes\n\nno table, this\n")
    (tmp_path / ".hidden").write_text("nor this")
    os.mkfifo(tmp_path / "pipe")
    assert main(["backtest", "--bank", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert [one["path"] for one in found["unread"]] == [str(tmp_path / "notes.md")]
    assert [part["fraction"] for part in found["bank"]] == [0.25, 0.5, 0.75]
    assert [row["method"] for row in found["bank"][2]["rows"]] == [OURS, *BANK_RIVALS]
    ours = found["bank"][0]["rows"][0]
    assert (ours["runs"], [one["runs"] for one in ours["refused"]]) == (0, [2])
    assert main(["backtest", "--bank", str(tmp_path), "--at", "3/4"]) == 0
    out, err = capsys.readouterr()
    assert "first 3/4 of the compute" in out
    assert "first 1/2" not in out
    assert "left out: " in err
    assert "notes.md" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bank", "{}/none"], "none: no such folder"),
        (["--bank", "{}/a.csv"], "a.csv: no such folder"),
        (["--bank", "{}/empty"], "empty: there is nothing in it"),
        (["--bank", "{}/run"], "run: a run, not a folder of runs: leave out --bank"),
        (["--bank", "{}/junk"], "junk"),
        (["--bank", "{}/empty", "{}/a.csv"], "or --bank FOLDER"),
        ([], "give runs and files, or --bank FOLDER"),
    ],
)
def test_errors_are_one_line(words, said, tmp_path, capsys):
    for name in ("empty", "run", "junk"):
        (tmp_path / name).mkdir()
    put(tmp_path / "a.csv", a_run())
    (tmp_path / "run" / "evals.jsonl").write_text("")
    (tmp_path / "junk" / "x.txt").write_text("words")
    assert main(["backtest", *(word.format(tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
