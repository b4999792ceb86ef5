"""MkDocs hooks that complete the pages of docs/ at build time; the sources stay readable on a code host.

A link that leaves docs/ becomes the path of its target, as the site has no page for it; a link whose text is
a file name gets the title of that page. A comment `<!-- table: NAME ARGUMENT -->` is replaced by a table
generated from the code, so that it cannot drift. The build fails if the site would load anything from the
network.
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
    """Fill in the tables and rewrite the links."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    filled = _TABLE.sub(lambda found: TABLES[found["name"]](*filter(None, [found["argument"]])), markdown)
    return _LINK.sub(lambda found: link(found, folder), filled)


def link(found: re.Match[str], folder: str) -> str:
    """Return a link with its file name replaced by the page's title, or a path if it leaves docs/."""
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
    """Fail the build if a page or style sheet would load anything from the network."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (found := fetched(file.read_text(), file.suffix)):
            raise PluginError(f"{file}: loads {', '.join(found)}; the site works without the network")


def fetched(text: str, suffix: str) -> list[str]:
    """Return the network addresses that a page or style sheet loads from; links to follow do not count."""
    if suffix == ".css":
        return _IN_STYLE.findall(text)
    tags = [tag for tag in _LOADING.findall(text) if not _NOT_LOADED.search(tag)]
    return [address for tag in tags for address in _ADDRESS.findall(tag)]
