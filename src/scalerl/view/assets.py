"""What pages are made of: templates, and the files of `scalerl/view/web`, which they hold in themselves.

And how a file is written: whole or not at all.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from scalerl.errors import printable
from scalerl.files import write_atomically, writing
from scalerl.jsonl import plain

WEB = Path(__file__).parent / "web"
TEMPLATES = Path(__file__).parent / "templates"
CHART = ("plotly-basic.min.js", "marks.js", "below.js", "chart.js", "start.js")
"""The scripts of a chart, in the order in which a page needs them; `chart.css` is their look."""


def write_text(path: Path, text: str, advice: str = "") -> Path:
    """Write one file, whole or not at all, its folder too, and return where it is.

    Raises:
        WriteError: the disk does not take it; its text ends with `advice`.
    """
    with writing(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


@functools.cache
def _templates() -> Any:
    """It keeps what it has compiled, which takes a tenth of the time of a page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, content: Mapping[str, Any]) -> str:
    """A page from its template; all texts in it are escaped."""
    text = _templates().get_template(template).render(content)
    return text.encode(errors="backslashreplace").decode()  # JSON and file names may hold half letters


def without_folders(message: str, *folders: Path) -> str:
    """The message without the folders that it is about: a page is shown on other machines."""
    # The longest first, as one of the folders may be within another.
    for folder in sorted(map(str, folders), key=len, reverse=True):
        message = message.replace(f"{folder}{os.sep}", "")
    return printable(message)


def link(target: Path, folder: Path) -> str:
    """The address of a file, as a page in `folder` names it."""
    return quote(os.fsencode(Path(os.path.relpath(target, folder)).as_posix()))


def asset(name: str) -> str:
    """The text of one file of the folder."""
    return (WEB / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """`data` as JSON that may stand inside of `<script type="application/json">`, whatever its texts hold."""
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    # `</script>` in the name of a run would end the element, and what follows would be HTML.
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
