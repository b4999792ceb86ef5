"""The README keeps its word: its example prints what it shows, its commands and files exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.cli.main import _parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_prints_what_the_readme_shows(tmp_path):
    code, output = re.findall(r"```(?:python)?\n(.*?)```", README, flags=re.DOTALL)[:2]
    assert code == (ROOT / "examples" / "fit_a_log.py").read_text().split("\n\n", 1)[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == output


def test_every_example_runs(tmp_path):
    for example in sorted((ROOT / "examples").glob("*.py")):
        subprocess.run([sys.executable, str(example)], check=True, capture_output=True, cwd=tmp_path)
        assert len(example.read_text().splitlines()) < 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_are_commands(page):
    """Every `scalerl ...` line of a code block parses; words in capitals stand for what the reader has."""
    for line in re.findall(r"^    (scalerl .*)$", page.read_text(), flags=re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        assert _parser().parse_args(words).run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_makefile_has_the_two_commands():
    for command in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{command}:" in (ROOT / "Makefile").read_text()


def test_no_placeholder_is_left():
    for page in [*PAGES, ROOT / "benchmarks" / "RESULTS.md"]:
        assert not re.search(r"@[A-Z]+@", page.read_text()), page
