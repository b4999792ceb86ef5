"""The parts of pages: templates, and the files of `scalerl/view/web`, which pages contain inline.

Files are written atomically.
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
"""The scripts of a chart, in the order in which a page needs them; `chart.css` is their style sheet."""


def write_text(path: Path, text: str, advice: str = "") -> Path:
    """Write a file atomically, creating its folder if needed, and return its path.

    Raises:
        WriteError: the file cannot be written; the message ends with `advice`.
    """
    with writing(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


@functools.cache
def _templates() -> Any:
    """Return the templates; the cache saves compiling them, a tenth of the time of a page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, content: Mapping[str, Any]) -> str:
    """Render a page from its template; all texts in it are escaped."""
    text = _templates().get_template(template).render(content)
    return text.encode(errors="backslashreplace").decode()  # JSON and file names may hold lone surrogates


def without_folders(message: str, *folders: Path) -> str:
    """Return a message without these folders' paths, as pages are shown on other machines."""
    # The longest first, as one of the folders may be within another.
    for folder in sorted(map(str, folders), key=len, reverse=True):
        message = message.replace(f"{folder}{os.sep}", "")
    return printable(message)


def link(target: Path, folder: Path) -> str:
    """Return the address of a file relative to a page in `folder`."""
    return quote(os.fsencode(Path(os.path.relpath(target, folder)).as_posix()))


def asset(name: str) -> str:
    """Return the text of a file in `WEB`."""
    return (WEB / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """Return `data` as JSON that is safe inside `<script type="application/json">`, whatever its texts."""
    text = json.dumps(plain(data), separators=(",", ":"), allow_nan=False)
    # `</script>` in the name of a run would end the element, and what follows would be HTML.
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
