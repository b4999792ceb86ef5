"""What MkDocs does to the pages of docs/ beyond Markdown: they stay readable as they are on a code host.

Links that leave docs/ become the path they lead to, as there is nothing to link to on the site; links that
are named by a file get the title of its page. Comments of the form `<!-- table: NAME ARGUMENT -->` are
replaced by a table made from the code, so that it cannot drift. A site that would load anything from the
network is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from docs_tables import TABLES
from mkdocs.exceptions import PluginError

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s#]+)(?:#[^()\s]*)?\)")
_LOADING = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*", re.IGNORECASE)
_NOT_LOADED = re.compile(r"\brel=[\"']?(?:canonical|prev|next)")
_ADDRESS = re.compile(r"""\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
_IN_STYLE = re.compile(r"""(?:url\(|@import )\s*["']?((?:https?:)?//[^"')\s]+)""")
_TABLE = re.compile(r"^<!-- table: (?P<name>[\w-]+)(?: (?P<argument>[\w-]+))? -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables, and name what a link outside of docs/ leads to."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    filled = _TABLE.sub(lambda found: TABLES[found["name"]](*filter(None, [found["argument"]])), markdown)
    return _LINK.sub(lambda found: link(found, folder), filled)


def link(found: re.Match[str], folder: str) -> str:
    """A link, with the title of a page for the name of its file; where it leaves docs/, the path it has."""
    target, text = found["target"], found["text"]
    if "://" in target or target.startswith("mailto:"):
        return found[0]
    place = posixpath.normpath(posixpath.join(folder, target))
    said = text.strip("`")
    if place.startswith("docs/"):
        page = _ROOT / place
        if said != page.name or not page.is_file():
            return found[0]
        return found[0].replace(f"[{text}]", f"[{page.read_text().partition('# ')[2].partition(chr(10))[0]}]")
    return f"`{place}`" if place.endswith(said) else f"{text} (`{place}`)"


def on_post_build(config: Any, **_: Any) -> None:
    """Look for what a browser would fetch from elsewhere."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (found := fetched(file.read_text(), file.suffix)):
            raise PluginError(f"{file}: loads {', '.join(found)}; the site works without the network")


def fetched(text: str, suffix: str) -> list[str]:
    """The addresses that a page or a style sheet loads something from; links that are followed are none."""
    if suffix == ".css":
        return _IN_STYLE.findall(text)
    tags = [tag for tag in _LOADING.findall(text) if not _NOT_LOADED.search(tag)]
    return [address for tag in tags for address in _ADDRESS.findall(tag)]
