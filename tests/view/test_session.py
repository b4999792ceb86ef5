"""What people do in a Python session: load, fit, look, and go on with pandas."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import example_files
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import scalerl
from scalerl._views import Views
from scalerl.cli.main import main
from scalerl.errors import CannotAnswerError, InputError
from scalerl.view import notebook
from scalerl.view.facts.fit_rows import fit_rows

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return example_files.write(tmp_path)


@pytest.fixture
def fitted(places):
    return scalerl.fit(scalerl.load_run("runs/mine"))


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    plt.close("all")


class Checked(HTMLParser):
    """Every tag that is opened is closed, and the words are kept."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_run_folder_and_a_log_are_loaded_as_the_commands_read_them(places, capsys):
    run = scalerl.load_run(places / "runs" / "mine")
    assert run.config["name"] == "m"
    log = scalerl.load_run("verl.jsonl", devices=8)
    assert log.config["source"]["trainer"] == "verl"
    assert log.compute("gpu_hours")[1] == pytest.approx(8 * 9e5 / 3600)
    assert scalerl.load_run("log.jsonl", metric="eval/accuracy").evals[3].step == 3
    assert main(["fit", "verl.jsonl", "--devices", "8"]) == 0
    assert f"{scalerl.fit(log).median.A:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere", {}, "nowhere: no such file or folder"),
        ("log.csv", {}, "log.csv: a table, not a run: use scalerl.read_table"),
        ("verl.jsonl", {"format": "paper"}, "no format 'paper'"),
        ("verl.jsonl", {"run": "other"}, "no run 'other'; there are "),
        ("runs/mine", {"metric": "reward"}, "a run folder has its own pass rates"),
        ("runs", {}, "runs"),
        (None, {}, "expected the path of a file or folder, found None"),
    ],
)
def test_what_is_no_run_is_refused(places, path, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        scalerl.load_run(path, **options)


def test_a_table_is_fitted_by_its_points_or_its_frame(places):
    points = scalerl.fit(scalerl.read_table("log.csv"))
    frame = scalerl.fit(pd.read_csv("log.csv"))
    assert frame.median == points.median
    assert frame.axis == "gpu_hours"
    renamed = pd.read_csv("log.csv").rename(columns={"gpu_hours": "hours", "pass_rate": "acc"})
    assert scalerl.fit(renamed, x="hours", y="acc").median == points.median
    numbered = renamed[["hours", "acc"]].set_axis([0, 1], axis=1)
    bare = scalerl.fit(renamed[["hours", "acc"]], x="hours", y="acc").median
    for x, y in ((0, 1), ("0", "1")):
        assert scalerl.fit(numbered, x=x, y=y).median == bare  # type: ignore[arg-type]


def test_a_run_comes_back_from_its_frame(fitted):
    run = scalerl.load_run("runs/mine")
    frame = run.to_frame()
    assert len(frame) == len(run.evals)
    assert list(frame.columns[:4]) == ["step", "pass_rate", "noise_sd", "gpu_hours"]
    assert frame["flops"].isna().all()
    again = scalerl.fit(frame)
    assert again.median == fitted.median
    assert again.noise == fitted.noise
    np.testing.assert_array_equal(again.points.noise_sd_N, fitted.points.noise_sd_N)
    np.testing.assert_array_equal(again.points.samples_N, fitted.points.samples_N)


def test_the_idle_start_of_a_run_is_no_compute_in_its_frame(places):
    path = places / "runs" / "mine" / "evals.jsonl"
    path.write_text(path.read_text().replace('"idle": 0', '"idle": 3600'))
    run = scalerl.load_run("runs/mine")
    assert run.compute("gpu_hours")[0] == 1.0
    assert run.to_frame()["gpu_hours"][0] == 0.0 == scalerl.fit(run).points.compute_N[0]


def test_rows_without_a_pass_rate_are_left_out_and_counted(places):
    frame = pd.read_csv("log.csv")
    frame.loc[[3, 5], "pass_rate"] = np.nan
    fit = scalerl.fit(frame)
    assert fit.n_points == len(frame) - 2
    assert any("2 evaluations of 'pass_rate' left out, NaN" in warning for warning in fit.warnings)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda f: f,
            {"x": "flops"},
            "data frame: no column is named 'flops'; pass x=... for the compute, y=... for",
        ),
        (lambda f: f.assign(pass_rate="high"), {}, "data frame, column 'pass_rate': not all numbers"),
        (
            lambda f: f.assign(pass_rate=100 * f.pass_rate),
            {},
            "data frame, row 0: pass rate 30.08 is above 1",
        ),
        (lambda f: f.assign(gpu_hours=-f.gpu_hours), {}, "data frame, row 1: gpu_hours -400 is negative"),
        (lambda f: "log.csv", {}, "found str"),
        (lambda f: f.to_dict("list"), {"y": "pass_rate"}, "of arrays scalerl.Points.from_arrays(x, y)"),
        (lambda f: scalerl.load_run("runs/mine"), {"y": "acc"}, "y='acc' names a column of a data frame"),
    ],
)
def test_a_frame_that_cannot_be_fitted_says_why(places, change, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        scalerl.fit(change(pd.read_csv("log.csv")), **options)


def test_frames_at_a_price(places):
    frame = pd.read_csv("log.csv")
    fit = scalerl.fit(frame, x="dollars", price=2.0)
    assert fit.points.compute_N[-1] == 2 * frame.gpu_hours.iloc[-1]


def test_without_pandas_there_is_one_line(places):
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import scalerl\n"
        "try: scalerl.load_run('runs/mine').to_frame()\n"
        "except scalerl.InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "a data frame needs pandas: pip install pandas\n"


def test_a_comparison_and_a_backtest_as_frames(places):
    runs = {name: [scalerl.fit(scalerl.load_run(f"runs/{name}-seed0"))] for name in "ab"}
    comparison = scalerl.compare(runs)
    frame = comparison.to_frame()
    (pair,) = comparison.pairs
    ceiling = frame[frame.quantity == "A"].iloc[0]
    assert (ceiling.low, ceiling.high) == pair.differences["A"].interval
    assert ceiling.verdict == pair.ceiling.verdict
    assert set(frame.quantity) == set(pair.differences)
    test = scalerl.backtest([scalerl.load_run("runs/mine")], fractions=[1 / 8, 1 / 2])
    frame = test.to_frame()
    half = frame[frame.fraction == 0.5]
    later = test.cuts[1].later
    np.testing.assert_array_equal(half["measured"], later.pass_rate_M)
    np.testing.assert_array_equal(half["scalerl"], later.point_M["scalerl"])
    assert set(frame.source) == set(test.sources)


def test_a_forecast_takes_an_amount_as_the_command_does(places, capsys):
    """Twice the data is twice all that was measured, also where the fit leaves some of it out."""
    words = ["fit", "runs/mine", "--max-compute", "8k", "--at", "2x,12 kh,12k", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)["forecast"]
    part = scalerl.fit(scalerl.load_run("runs/mine"), max_compute=8000)
    assert [part.forecast(text).to_json() for text in ("2x", "12 kh", "80k")] == said
    assert part.forecast(["2x", 100]).compute.tolist() == [20_000, 100]
    assert part.plot(forecast="2x").get_xlim()[1] > 20_000
    asked = r"^forecast '3TFLOP': compute is on the axis gpu_hours here, and not on flops$"
    with pytest.raises(scalerl.InputError, match=asked):
        part.forecast("3TFLOP")


def test_amounts_of_compute_stand_with_their_unit(fitted):
    rows = dict(fit_rows(fitted, at=[16_000], target=0.5, budget=20_000))
    assert rows["C_mid"].endswith("] GPU-hours")
    assert "at 16,000 GPU-hours" in rows
    assert "at 16,000 GPU-hours" in fitted.forecast(16_000)._repr_html_()


def test_a_record_shows_itself_in_a_line(places):
    shown = repr(scalerl.load_run("runs/mine"))
    assert re.fullmatch(
        r"<RunRecord 'm'; 26 evaluations; steps 0 to 100, pass rate 0\.\d+ to 0\.\d+; "
        r"gpu_hours to 1e\+04; runs/mine>",
        shown,
    )
    assert len(repr(scalerl.load_run("verl.jsonl"))) < 300
    assert repr(scalerl.RunRecord(Path("nowhere"), {}, ())) == "<RunRecord 'nowhere'; 0 evaluations; nowhere>"


def test_a_frame_has_no_numbers_where_nothing_is_known(places):
    frame = scalerl.load_run("verl.jsonl").to_frame()
    assert frame["version"].isna().all()
    assert frame["n_prompts"].isna().all()
    assert (frame["n_samples"] == 16).all()  # mean@16 says it
    assert (scalerl.load_run("runs/mine").to_frame()["n_prompts"] == 256).all()
    assert scalerl.fit(frame).n_points == 26


def test_what_is_no_number_is_refused_by_name(fitted):
    """Not by what numpy or Python would say of it."""
    asked = "a compute to forecast at: expected a number, found 'x'"
    for ask in (
        lambda: fitted.plot(forecast=[1, "x"]),
        lambda: fitted.forecast([1, "x"]),
        lambda: fitted.forecast("x"),
    ):
        with pytest.raises(scalerl.InputError, match=asked):
            ask()
    with pytest.raises(scalerl.InputError, match="the target must be a number, found 'high'"):
        fitted.verdict("high", 16_000)
    with pytest.raises(scalerl.InputError, match="the number of devices must be a number, found 'abc'"):
        scalerl.load_run("log.csv", devices="abc")  # type: ignore[arg-type]
    with pytest.raises(scalerl.InputError, match="at must be a number, found '6e11'"):
        fitted.to_latex(at="6e11")
    for read in (scalerl.read_table, scalerl.RunRecord.read):
        with pytest.raises(scalerl.InputError, match="expected the path of a file or folder, found None"):
            read(None)  # type: ignore[arg-type]


def test_results_show_themselves_escaped_in_a_notebook(places):
    name = "<img src=x onerror=alert(1)>"
    run = scalerl.load_run("runs/mine")
    run.config["name"] = name
    fit = scalerl.fit(run)
    comparison = scalerl.compare({name: [fit], "b & c": [scalerl.fit(scalerl.load_run("runs/b-seed0"))]})
    frame = pd.read_csv("log.csv").rename(columns={"gpu_hours": name})
    test = scalerl.backtest([run], fractions=[1 / 2])
    odd = scalerl.fit(frame, x=name)
    shown = [run, fit, odd, fit.forecast(16_000), comparison, test]
    for one in shown:
        found = Checked(one._repr_html_())
        assert {"img", "script", "link", "style"}.isdisjoint(found.tags) or one in (fit, odd)
        assert "img" not in found.tags
        assert not re.search(r'(src|href)="(?!#)', one._repr_html_())
    assert name in "".join(Checked(run._repr_html_()).words)
    assert name in "".join(Checked(odd._repr_html_()).words)
    assert f"{fit.median.A:.3f}" in fit._repr_html_()
    assert "<svg" in fit._repr_html_()
    assert "var(--" not in fit._repr_html_()
    assert comparison.pairs[0].ceiling.verdict.upper() in comparison._repr_html_()


def test_every_view_that_results_may_call_is_there():
    assert len(Views.__annotations__) >= 6
    for name in Views.__annotations__:
        assert callable(getattr(notebook, name))


def test_the_page_of_python_runs(places):
    """Its blocks in turn, in one session, beside the files that they name."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "howto/python.md").read_text(), flags=re.S)
    assert len(blocks) >= 4
    plt.switch_backend("agg")
    names = {}
    for block in blocks:
        exec(block, names)
    assert (places / "curve.png").stat().st_size > 5000


def test_what_cannot_be_answered_is_said_as_everywhere(places):
    with pytest.raises(CannotAnswerError):
        scalerl.fit(pd.read_csv("log.csv").head(3))


def test_a_folder_of_runs_is_not_read_as_one_of_them(places):
    shutil.copytree("runs/mine", "runs/tensorboard-like")
    (places / "runs" / "verl.jsonl").write_bytes((places / "verl.jsonl").read_bytes())
    with pytest.raises(scalerl.InputError, match=r"runs: a folder, not a run; .*mine, .*verl"):
        scalerl.load_run("runs")


def test_a_run_without_an_evaluation_is_none_of_another_trainer(places):
    """Its trackers may write into it before."""
    (places / "new").mkdir()
    (places / "new" / "config.json").write_text('{"schema": 1}')
    (places / "new" / "verl.jsonl").write_bytes((places / "verl.jsonl").read_bytes())
    with pytest.raises(scalerl.InputError, match="new: the run has no evaluation yet"):
        scalerl.load_run("new")


@pytest.mark.parametrize("devices", [-8, 0, float("nan")])
def test_a_number_of_devices_is_above_0(places, devices):
    with pytest.raises(scalerl.InputError, match="the number of devices is a number above 0"):
        scalerl.load_run("verl.jsonl", devices=devices)
