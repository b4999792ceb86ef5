"""The examples of the documentation: what they run, and what they print.

A page that names its logs (`<!-- example: NAME -->`) has its commands and Python run in the order in which
they stand, in one folder where those logs are, unless `<!-- not run: WHY -->` stands before them. A block
without a language that follows is what they print, which `python tests/support/docs_examples.py [PAGE ...]`
writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LOGS = re.compile(r"^<!-- example: ([\w-]+) -->$", re.MULTILINE)
_BLOCK = re.compile(
    r"(?P<not_run>^<!-- not run: [^\n]* -->\n+)?"
    r"(?P<code>(?:^    scalerl [^\n]*\n)+|^```python\n.*?^```\n)"
    r"(?P<before>\n*^```\n)?(?P<output>(?(before).*?))(?(before)^```\n)",
    re.MULTILINE | re.DOTALL,
)


def pages() -> list[Path]:
    """The pages whose examples run."""
    return [page for page in sorted(DOCS.rglob("*.md")) if logs_of(page)]


def logs_of(page: Path) -> str:
    """The name of the logs that a page speaks of; empty where none of it runs."""
    found = _LOGS.search(page.read_text())
    return found[1] if found else ""


def blocks(text: str) -> Iterator[re.Match[str]]:
    """The blocks that run."""
    return (block for block in _BLOCK.finditer(text) if not block["not_run"])


def commands(text: str) -> list[str]:
    """Every command line of a page, those that are not run too; what is printed holds none."""
    without_output = re.sub(r"^```\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^ *(?:\$ )?(scalerl .*)$", without_output, flags=re.MULTILINE)


def run_block(code: str, names: dict[str, Any]) -> str:
    """What a block prints, on both of its streams in their order."""
    if not code.startswith("```python"):
        return "".join(run_command(line) for line in code.splitlines())
    with captured() as printed:
        exec(compile(code.removeprefix("```python\n").removesuffix("```\n"), "example", "exec"), names)
    return printed.getvalue()


def run_command(line: str) -> str:
    """What a command line prints: all, or its first rows, by `| head -n ROWS`."""
    from scalerl.cli.main import main

    command, _, rows = line.partition(" | head -n ")
    with captured() as printed:
        status = main(shlex.split(command, comments=True)[1:])
    assert status == 0, f"{line.strip()}: exit status {status}: {printed.getvalue()}"
    return "".join(printed.getvalue().splitlines(keepends=True)[: int(rows) if rows else None])


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Standard output and errors, in one; without warnings."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield printed


def run_page(page: Path, take: Callable[[re.Match[str], str], None]) -> None:
    """Run a page in a folder `my-run`, made in the current one; `take` gets every block and its output.

    A log that is called as all are, `run.log`, has the name of its folder.
    """
    from docs_logs import MAKERS

    names: dict[str, Any] = {"__name__": "__main__"}
    Path("my-run").mkdir()
    with contextlib.chdir("my-run"):
        MAKERS[logs_of(page)]()
        for block in blocks(page.read_text()):
            take(block, run_block(block["code"], names))


def rewrite(page: Path) -> None:
    """Write what the examples of a page print into it."""
    text, found = page.read_text(), []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run_page(page, lambda block, output: found.append((block, output)))
        finally:
            os.chdir(here)
    for block, output in reversed(found):
        if block["before"]:
            text = f"{text[: block.start('output')]}{output.strip()}\n{text[block.end('output') :]}"
    page.write_text(text)


if __name__ == "__main__":
    for one in map(Path, sys.argv[1:]) if sys.argv[1:] else pages():
        print(one)
        rewrite(one.resolve())
