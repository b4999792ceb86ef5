from __future__ import annotations

import dataclasses
import io

from scalerl.view import closing_rows, print_closing


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_closing_rows(run, tmp_path):
    rows = dict(closing_rows(run, report=tmp_path / "report.html"))
    assert rows["forecast"] == "0.753 [0.722, 0.781], at half of the compute"
    assert rows["measured"] == f"{run.evals[-1].pass_rate:.3f}: inside"
    assert rows["width"] == "0.059"
    assert rows["ceiling A at 50 %"] == "0.811 [0.768, 0.879]; known beforehand 0.820: inside"
    assert rows["report"] == str(tmp_path / "report.html")


def test_a_ceiling_that_the_interval_misses(run):
    missed = dataclasses.replace(run, config={**run.config, "ceiling": {"value": 0.9}})
    assert dict(closing_rows(missed))["ceiling A at 50 %"].endswith("known beforehand 0.900: outside")


def test_without_forecasts(run):
    rows = dict(closing_rows(dataclasses.replace(run, forecasts=())))
    assert rows["forecast"] == "none was frozen during the run"
    assert rows["measured"].endswith("at step 240")
    assert rows["ceiling A"] == "not fitted; known beforehand 0.820"


def test_plain_text_away_from_a_terminal(run):
    out = io.StringIO()
    print_closing(run, file=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "scalerl-chain"
    assert lines[1] == "  forecast           0.753 [0.722, 0.781], at half of the compute"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_brackets_are_no_markup(run):
    named = dataclasses.replace(run, config={**run.config, "name": "[red]run[/]"})
    out = Terminal()
    print_closing(named, file=out)
    assert "[red]run[/]" in out.getvalue()
    assert "[0.722, 0.781]" in out.getvalue()
