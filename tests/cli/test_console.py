import io
import re

import pytest

from scalerl.cli.console import TrainingProgress, forecast_text


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
