"""The scripts of `scalerl completion`, sourced in the shells that they are for."""

import shutil
import subprocess

import pytest

from scalerl.cli.main import main


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name in ("runs/mine", "runs/theirs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rates.csv").write_text("")
    (tmp_path / "mine.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(shell, capsys, folder):
    assert main(["completion", shell]) == 0
    path = folder / f".completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


CASES = [
    ("scalerl comp", {"compare", "completion"}),
    ("scalerl fit --cr", {"--cross-check"}),
    ("scalerl fit r", {"runs", "rates.csv"}),
    ("scalerl fit --x gp", {"gpu_hours"}),
    ("scalerl report r", {"rates.csv", "runs"}),
    ("scalerl report runs/", {"runs/mine", "runs/theirs"}),
    ("scalerl fit --format trai", {"trainer-state"}),
    ("scalerl ingest --trainer ve", {"verl"}),
    ("scalerl train qw", {"qwen25_dapo"}),
    ("scalerl train mi", {"minimax_m1", "mine.toml"}),
    ("scalerl train demo -o r", {"runs"}),
    ("scalerl completion z", {"zsh"}),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash(places, capsys, line, expected):
    words = [*line.split(" ")]
    code = (
        f"source {script('bash', capsys, places)}; COMP_WORDS=({' '.join(words)}); "
        f"COMP_CWORD={len(words) - 1}; _shtab_scalerl 2>/dev/null; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish(places, capsys, line, expected):
    code = f"source {script('fish', capsys, places)}; complete -C '{line}'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True)
    found = {text.split("\t")[0].rstrip("/") for text in done.stdout.splitlines()}
    assert found == expected


ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1= ; autoload -Uz compinit; compinit -u -D; source {script}; compdef _shtab_scalerl scalerl'
zpty -w shell "bindkey '^I' complete-word; echo RE''ADY"
zpty -r shell text '*READY*'
zpty -w -n shell $'{line}\\t'
zpty -r -m shell text '*{expected}*' && print found
"""


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("scalerl fit --cr", "--cross-check"),
        ("scalerl fit --format trai", "trainer-state"),
        ("scalerl ingest --trainer ve", "verl"),
        ("scalerl train qw", "qwen25_dapo"),
        ("scalerl report ru", "ru*ns"),
        ("scalerl fit --x gp", "gpu_hours"),
    ],
)
def test_zsh(places, capsys, line, expected):
    code = ZSH.format(script=script("zsh", capsys, places), line=line, expected=expected)
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("found\n"), done


@pytest.mark.skipif(not shutil.which("tcsh"), reason="needs tcsh")
def test_tcsh_takes_the_script(places, capsys):
    path = script("tcsh", capsys, places)
    done = subprocess.run(["tcsh", "-f", "-c", f"source {path}; complete"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "qwen25_dapo" not in done.stdout
    assert "/--x=/(gpu_hours " in done.stdout
