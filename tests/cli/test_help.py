"""Help, its examples, and what stands by a usage error; who gets colours, and what help does not load."""

import os
import pty
import re
import shlex
import subprocess
import sys
from typing import Any

import example_files
import pytest

from scalerl.cli.main import _parser, main
from scalerl.errors import ScalerlError
from scalerl.view.terminal.rows import print_table

COMMANDS: Any = next(action.choices for action in _parser()._actions if action.metavar == "COMMAND")
QUICK = ("fit", "compare", "backtest", "report", "ingest", "completion")


def examples(command):
    """The lines of a command's epilog that are commands."""
    return re.findall(r"^  (scalerl .*)$", COMMANDS[command].epilog or "", flags=re.MULTILINE)


def shown(words, env, terminal=False):
    """What a command prints, to a pipe or to a terminal, with these variables and no others that count."""
    counted = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS")
    whole = {key: value for key, value in os.environ.items() if key not in counted} | {"TERM": "xterm"} | env
    command = [sys.executable, "-m", "scalerl", *words]
    if not terminal:
        return subprocess.run(command, capture_output=True, text=True, env=whole, check=True).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=whole) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    return text.decode().replace("\r\n", "\n")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with what the examples name."""
    monkeypatch.chdir(tmp_path)
    return example_files.write(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_that_parse(command):
    assert 2 <= len(examples(command)) <= 4
    assert COMMANDS[command].description
    for line in examples(command):
        _, *words = shlex.split(line.partition(" > ")[0], comments=True)
        assert words[0] == command
        assert _parser().parse_args(words).run
    assert all(len(line) < 110 for line in COMMANDS[command].format_help().splitlines())


@pytest.mark.parametrize("command", QUICK)
def test_examples_that_are_quick_run(places, capsys, command):
    run = 0
    for line in examples(command):
        _, *words = shlex.split(line.partition(" > ")[0], comments=True)
        if "wandb/" in line:
            continue
        assert main(words) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
        run += 1
    assert run >= 2


def test_without_a_command_there_is_help_and_status_2(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: scalerl ")


def test_help_of_a_command_by_either_name(capsys):
    texts = []
    for words in (["help", "fit"], ["fit", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "--cross-check" in texts[0]


def test_the_statuses_are_those_of_the_errors():
    said = {int(status) for status in re.findall(r"^  (\d+) ", str(_parser().epilog), flags=re.MULTILINE)}

    def statuses(kind):
        return {kind.exit_status}.union(*map(statuses, kind.__subclasses__()))

    assert said == statuses(ScalerlError) | {0, 141, 143}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ftt", "log.csv"], "'ftt', did you mean 'fit'?"),
        (["compair"], "did you mean 'compare'?"),
        (["forecast", "log.csv"], "'forecast', did you mean 'fit'?"),
        (["fit", "x", "--goal", ".5"], "did you mean '--target R'?"),
        (["compare", "a", "b", "--names", "a,b"], "did you mean '--group NAME=RUN,RUN'?"),
        (["xyz"], "choose from fit, compare, "),
        (
            ["fit", "x", "--crosscheck"],
            "scalerl fit: unrecognized arguments: --crosscheck, did you mean '--cross-check'?",
        ),
        (["fit", "x", "--targt=.5"], "did you mean '--target'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["fit", "x", "--metric", "acc"], "did you mean '--y NAME'?"),
        (["fit", "x", "--metrics", "acc"], "did you mean '--y NAME'?"),
        (["train", "demo", "--metrics", "acc"], "unrecognized arguments: --metrics acc (see"),
        (["fit", "x", "--steps=3"], "did you mean '--x steps'?"),
        (["train", "demo", "--steps", "9"], "did you mean '--set budget.kind=steps --set budget.amount=N'?"),
    ],
)
def test_what_is_near_is_offered(capsys, words, hint):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
    assert ("did you mean" in hint) == ("did you mean" in error)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command):
    code = (
        "import sys; from scalerl.cli.main import main\n"
        f"try: main({[*command.split(), '--help']!r})\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'numpy', 'matplotlib', 'jinja2', 'torch', 'rich', 'rich_argparse', 'shtab', 'pandas'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    ("env", "terminal", "coloured"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "", "NO_COLOR": ""}, True, True),
    ],
)
def test_colours_are_for_those_who_want_them(places, env, terminal, coloured):
    for words in (["fit", "--help"], ["fit", "log.csv"]):
        assert ("\x1b[" in shown(words, env, terminal)) == coloured, words


def test_coloured_help_says_what_plain_help_says():
    for words in (["--help"], ["fit", "--help"]):
        coloured = re.sub(r"\x1b\[[\d;]*m", "", shown(words, {"FORCE_COLOR": "1"}))
        assert [line.rstrip() for line in coloured.splitlines()] == shown(words, {}).splitlines()


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}])
def test_a_pipe_gets_whole_lines_whatever_the_width(places, capsys, monkeypatch, env):
    for name, value in {"COLUMNS": "40", "TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    text = "a cell of many words " * 12
    print_table([("label", text), ("other", "b")])
    print_table([(text, text), ("c", "d")], header=("one", "two"))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) == 2 + 3
    assert text.strip() in lines[0]
    assert lines[3].count(text.strip()) == 2
    assert main(["fit", "log.csv", "--at", "20000"]) == 0
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert any(line.startswith("at 20,000 ") and "rerun [" in line for line in out.splitlines())
