import io
import re
import time

import pytest

from scalerl.cli.console import StudyProgressBar, TrainingProgress, forecast_text
from scalerl.record.activity import Activity, Count
from scalerl.rl.loop.progress import Progress
from scalerl.study.run.runner import StudyProgress


def test_a_forecast_on_the_progress_line():
    forecast = {"median": 0.7891, "prediction": [0.7618, 0.8145], "fit_json": {"lack_of_fit": None}}
    assert forecast_text(None) == ""
    assert forecast_text(forecast) == "  end 0.789 [0.762, 0.815]"
    forecast["fit_json"] = {"lack_of_fit": "peaked"}
    assert forecast_text(forecast).endswith("[0.762, 0.815]  no curve describes the run: peaked")


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("env", "terminal", "bar", "coloured"),
    [
        ({}, True, True, True),
        ({"NO_COLOR": "1"}, True, True, False),
        ({"TERM": "dumb"}, True, False, False),
        ({}, False, False, False),
        ({"FORCE_COLOR": "1"}, False, False, False),
    ],
)
def test_a_bar_is_for_a_terminal_that_can_draw_it_and_lines_for_all_else(
    monkeypatch, env, terminal, bar, coloured
):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    with TrainingProgress("mine") as progress:
        progress.show(0.5, "step 7", line=True)
    text = stream.getvalue()
    assert "step 7" in text
    assert text.startswith("mine   50%") == (not bar)
    assert ("\x1b[?25l" in text) == bar  # the cursor is hidden while a bar moves
    assert bool(re.search(r"\x1b\[[\d;]*m", text)) == coloured


def test_a_pipe_gets_a_line_now_and_then_before_the_first_step_too(monkeypatch):
    monkeypatch.setattr("scalerl.cli.console._QUIET", 0.5)
    stream = Stream(terminal=False)
    monkeypatch.setattr("sys.stderr", stream)
    now = time.time()
    with TrainingProgress("mine") as progress:
        progress.activity(
            Activity("evaluating", 0, Count(120, 400, "completions", now - 10), 0, now - 10, now)
        )
        wait_for(lambda: stream.getvalue().count("evaluating 120 of 400 completions  done in 23 s") >= 2)
        progress.update(Progress(3, 0.25, 1200.0, 0.5))
        progress.activity(Activity("generating", 4, Count(5, 16, "groups"), 12_400, now - 10, now, left=90.0))
        wait_for(lambda: "step 4: generating 5 of 16 groups" in stream.getvalue())
    last = stream.getvalue().splitlines()[-1]
    for part in ("90 s left", "pass rate 0.500", "1240 tokens/s", "12,400 tokens"):
        assert part.replace("1240 tokens/s", "1.2k tokens/s") in last
    assert last.startswith("mine   25%")


def test_a_pipe_gets_a_line_now_and_then_on_the_runs_of_a_study(monkeypatch):
    stream = Stream(terminal=False)
    monkeypatch.setattr("sys.stderr", stream)
    now = StudyProgress(1, 6, (("base/seed0", 0.25, 0.298), ("grpo/seed0", 0.2, float("nan"))))
    with StudyProgressBar("sums") as progress:
        progress.update(now)
        assert not stream.getvalue()
        monkeypatch.setattr("scalerl.cli.console._QUIET", 0.0)
        progress.update(now)
    assert stream.getvalue() == "sums  1 of 6 runs  base/seed0 25%, 0.298  grpo/seed0 20%, –\n"
    stream.truncate(0)
    with StudyProgressBar("sums") as progress:
        progress.update(StudyProgress(0, 1, (("base/seed0", 0.25, 0.0),)))
    assert stream.getvalue().endswith("base/seed0 25%, 0.000, no held-out prompt solved\n")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_has_one_line_that_fits(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    now = time.time()
    with TrainingProgress("mine") as progress:
        progress.update(Progress(3, 0.25, 1200.0, 0.5))
        progress.activity(Activity("generating", 4, Count(5, 16, "groups"), 12_400, now - 10, now, left=90.0))
        time.sleep(0.5)
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line for part in drawn.split("\n") for line in part.split("\r") if "generating" in line]
    assert lines
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert "step 4: generating 5 of" in lines[-1]
    assert ("tokens/s" in lines[-1]) == (columns == 120)
    assert drawn.strip().count("\n") <= 1  # drawn in its place


def wait_for(condition, seconds=30.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)
