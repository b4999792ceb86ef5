"""The README keeps its word: its example prints what it shows, its commands and files exist."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl.cli.main import _parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def printed(code, *more):
    words = [sys.executable, "-c", code, *more]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_the_examples_print_what_the_readme_shows():
    command, rows, shown = re.findall(
        r"    scalerl ([^\n]*) \| head -n (\d)\n\n```\n(.*?)```", README, re.DOTALL
    )[0]
    output = printed("import sys; from scalerl.cli.main import main; sys.exit(main())", *command.split())
    assert "".join(output.splitlines(keepends=True)[: int(rows)]) == shown
    code, shown = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)[0]
    assert printed(code) == shown


def test_links_of_the_readme_are_absolute_in_the_metadata(monkeypatch):
    """On a package index; the address of the repository is said in one place."""
    monkeypatch.chdir(ROOT)
    said = {}
    monkeypatch.setattr("setuptools.setup", said.update)
    runpy.run_path("setup.py")
    targets = re.findall(r"\]\(([^)]+)\)", said["long_description"])
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", README)) > 40
    assert all(target.startswith("https://") for target in targets)
    assert next(target for target in targets if "raw." in target).endswith("/docs/assets/forecast.png")
    assert "OWNER/" not in README + (ROOT / "pyproject.toml").read_text()


def test_every_example_runs(tmp_path):
    for example in sorted((ROOT / "examples").glob("*.py")):
        subprocess.run([sys.executable, str(example)], check=True, capture_output=True, cwd=tmp_path)
        assert len(example.read_text().splitlines()) < 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_are_commands(page):
    """Every `scalerl ...` line of a code block parses; words in capitals stand for what the reader has."""
    for line in re.findall(r"^    (scalerl .*)$", page.read_text(), flags=re.MULTILINE):
        words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
        assert _parser().parse_args(words).run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_makefile_has_the_two_commands():
    for command in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{command}:" in (ROOT / "Makefile").read_text()


def test_readme_and_pages_stay_short():
    """What the reference is generated from is not counted. The bound may fall."""
    words = sum(len(page.read_text().split()) for page in PAGES if page.name != "CONTRIBUTING.md")
    assert words < 30_000


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_text_is_wrapped_and_every_item_begins_a_line(page):
    """Code and tables may be wider; wrapping must not pull the next item of a list into a paragraph."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "|"))]
    assert [line for line in lines if len(line) > 120] == []
    assert [line for line in lines if re.search(r"\S - \*\*|\S -$", line)] == []


def test_the_table_of_benchmarks_is_complete():
    """A script with a command line has a row; a module that scripts share is named below the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The benchmarks")[2]
    scripts = {path.name: "__main__" in path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    rows = re.findall(r"^\| `(\w+\.py)` \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(name for name, is_script in scripts.items() if is_script)
    assert set(re.findall(r"`(\w+\.py)`", text)) == scripts.keys()


def test_everything_is_where_the_table_of_contributors_says():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is what")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:4] for line in text.splitlines() if "`" in line][1:]
    assert len(rows) > 15
    for names, files in rows:
        for name, file in zip(names.split(";"), files.split(";"), strict=True):
            source = (ROOT / "src" / "scalerl" / file.strip(" `")).read_text()
            assert re.search(rf"^(class|def) {name.strip(' `')}\b", source, flags=re.MULTILINE), name


def test_no_placeholder_is_left():
    for page in [*PAGES, ROOT / "benchmarks" / "RESULTS.md"]:
        assert not re.search(r"@[A-Z]+@", page.read_text()), page
