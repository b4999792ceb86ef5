"""`scalerl watch` on a terminal: the view, what fits into it, and what the run is doing."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import time
from dataclasses import replace

import pytest
from growing import Growing
from rich.console import Console
from watching import COMMAND, FAST, follower, watching

from scalerl.jsonl import dumps
from scalerl.record.activity import Activity, Count
from scalerl.view.terminal.watch import view


def shown(*words, seconds=60, until=None, number=signal.SIGINT, size="100x40", **environment):
    """What the command shows on a terminal, without colours; a signal once `until` is seen."""
    parent, child = pty.openpty()
    columns, lines = size.split("x")
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": columns, "LINES": lines, **environment}
    process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=child, stderr=child, env=env)
    os.close(child)
    text, deadline, sent = "", time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        if not select.select([parent], [], [], 0.1)[0]:
            continue
        try:
            text += os.read(parent, 65536).decode(errors="replace")
        except OSError:  # its end
            break
        if until and until in text and not sent:
            process.send_signal(number)
            sent = True
    os.close(parent)
    return process.wait(20), text


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_view_of_a_terminal(tmp_path):
    run = Growing(tmp_path / "run", 45)
    run.alarm(100)
    status, text = shown(run.path, "--once", "--target", ".58")
    view = plain(text)
    assert status == 0
    lines = view.splitlines()
    assert lines[0].startswith("run  step 885  73 % of the budget")
    assert "●" in view
    assert "░" in view
    assert any("1,200 steps" in line and line.strip().startswith("0") for line in lines)
    for label in ("pass rate", "forecast", "ceiling A", "verdict", "health", "speed", "last line"):
        assert any(line.startswith(label) for line in lines), label
    assert "open: 1 alarm: truncated" in view
    assert "16 min ago" in view.replace("15.", "16.") or "min ago" in view
    assert max(map(len, lines)) <= 100
    assert "\x1b[" in text


def test_colours_and_signs_follow_the_terminal(tmp_path):
    run = Growing(tmp_path / "run", 45)
    _, text = shown(run.path, "--once", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    _, text = shown(run.path, "--once", PYTHONIOENCODING="ascii")
    assert text.isascii()
    assert "o" in plain(text).splitlines()[3]
    _, text = shown(run.path, "--once", TERM="dumb")
    assert plain(text).splitlines()[1].startswith("run  step 880  ")
    _, text = shown(run.path, "--once", size="60x24")
    assert max(len(line) for line in plain(text).splitlines()) <= 60


@pytest.mark.parametrize("size", ["40x12", "80x24", "60x30", "30x9"])
def test_a_small_terminal_gets_what_fits_and_no_entry_in_two(tmp_path, size):
    columns, lines = map(int, size.split("x"))
    run = Growing(tmp_path / "run", 45)
    run.alarm(100)
    followed = follower(run.path, target=0.58)
    assert followed.look()
    assert followed.run is not None
    page = io.StringIO()
    console = Console(width=columns, height=lines, file=page, color_system=None)
    console.print(view(followed.run, time.time(), console, "something is wrong"))
    shown = page.getvalue().splitlines()
    assert max(map(len, shown)) <= columns
    assert any("●" in line for line in shown) == (lines >= 24)  # the plot, or not
    if size != "30x9":  # which not even the least has room in
        assert len(shown) <= lines
    legend = [line for line in shown if "evaluation   " in line or "┄┄ ceiling A" in line]
    assert all(name in "\n".join(legend) for name in ("│ forecast", "┄┄ ceiling A")) or lines < 24
    assert not any(line.startswith("ceiling A   ╌") for line in shown)
    page = io.StringIO()
    whole = Console(width=columns, height=lines, file=page, color_system=None)
    whole.print(view(followed.run, time.time(), whole, is_whole=True))
    assert "speed" in page.getvalue()  # what stays on the screen leaves nothing out


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_view_ends_quietly(tmp_path, number, ends):
    run = Growing(tmp_path / "run", 12)
    status, text = shown(run.path, *FAST, until="last line", number=number)
    assert status == ends
    assert "Traceback" not in text
    assert plain(text).rstrip().splitlines()[-1].startswith("last line")
    # The alternate screen is left and the cursor shown; what was shown last comes after that.
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "last line" in text.partition("\x1b[?1049l")[2]
    run.end()
    status, text = shown(run.path, *FAST)
    assert status == 0
    assert "the run has ended" in plain(text)


def doing(path, ago=0.0, **changes):
    """What a run is doing, written into its folder as the trainer does."""
    now = time.time() - ago
    activity = Activity("generating", 4, Count(5, 16, "groups"), 12_400, now - 10, now)
    path.mkdir(exist_ok=True)
    (path / "progress.json").write_text(dumps(replace(activity, **changes).to_json()))


def test_a_run_before_its_first_evaluation_says_what_it_does(tmp_path):
    """As soon as its folder is there, before it has a config.json."""
    path = tmp_path / "run"
    count = Count(120, 400, "completions", time.time() - 10)
    doing(path, doing="evaluating", step=0, tokens=0, count=count)
    with watching(path) as process:
        assert process.stderr.readline().endswith("the run has no evaluation yet\n")
        assert process.stderr.readline() == "run: evaluating 120 of 400 completions  done in 23 s\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(("ago", "age"), [(0.0, ""), (180.0, "(as of 3.0 min ago)")])
def test_the_view_says_what_the_run_does_and_shows_its_newest_completion(tmp_path, ago, age):
    run = Growing(tmp_path / "run", 6)
    doing(run.path, ago)
    text = "a | b\n\x1b[2J" + "x" * 2000
    row = {"source": "training", "step": 50, "prompt_text": "1+2=", "completion": text, "reward": -1.0}
    run.writer.samples([row | {"finish": "truncated", "length": 999}])
    followed = follower(run.path)
    assert followed.look()
    assert followed.run is not None
    file = io.StringIO()
    console = Console(file=file, width=80, height=60, force_terminal=True, color_system=None)
    console.print(view(followed.run, time.time(), console, activity=followed.activity()))
    drawn = file.getvalue()
    assert "now         step 4: generating 5 of 16 groups  1.2k tokens/s  12,400 tokens" in drawn
    assert age in " ".join(drawn.split())
    assert "sample      training at step 50  reward -1  truncated after 999 tokens" in drawn
    assert "completion  a | b " in drawn
    assert "\x1b[2J" not in drawn
    assert re.search(r"\[\.\.\. 1,\d{3} more characters\]", drawn)
    assert max(map(len, drawn.splitlines())) <= 80
    assert drawn.count("x") > 200  # several lines of it
