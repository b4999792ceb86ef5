"""The page in a browser, opened so that nobody else on the machine learns its token."""

from __future__ import annotations

import html
import os
import tempfile
import threading
import webbrowser
from pathlib import Path


class Opening:
    """Opens `address` in the user's browser. Some browsers are waited for until they are closed: nobody is.

    All users of a machine see what a browser was called with. An address that is secret goes into a file that
    only this user reads, which leads on to it and is there until `close`.
    """

    def __init__(self, address: str, secret: bool) -> None:
        self._address, self._secret = address, secret
        self._file: Path | None = None

    def open(self) -> None:
        """Call the browser, and go on at once."""
        shown = self._address
        if self._secret:
            handle, name = tempfile.mkstemp(prefix="scalerl-", suffix=".html")  # of mode 0600
            self._file = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(_leading_to(self._address))
            shown = self._file.as_uri()
        threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    def close(self) -> None:
        """Remove what was left for the browser."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _leading_to(address: str) -> str:
    url = html.escape(address)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>scalerl</title>'
        f'<meta http-equiv="refresh" content="0; url={url}"><p><a href="{url}">The runs</a></html>\n'
    )
