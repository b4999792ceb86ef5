"""A server's socket and address, opening a browser on it, and an immediate shutdown."""

import html
import ipaddress
import os
import secrets
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from scalerl.errors import InputError
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve.app import make_app
from scalerl.view.serve.store import RunStore

_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class _Server(uvicorn.Server):
    """Stops at the first signal, event streams included, as these would never end by themselves."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Call `stop` at a signal."""
        self._stop()
        super().handle_exit(sig, frame)


class Opening:
    """Opens `address` in the user's browser, without waiting for the browser to be closed.

    All users of a machine can see the arguments of a browser. So a secret address goes into a file that only
    this user can read, which redirects to it and exists until `close`.
    """

    def __init__(self, address: str, secret: bool) -> None:
        self._address, self._secret = address, secret
        self._file: Path | None = None

    def open(self) -> None:
        """Start the browser, and return at once."""
        shown = self._address
        if self._secret:
            handle, name = tempfile.mkstemp(prefix="scalerl-", suffix=".html")  # of mode 0600
            self._file, url = Path(name), html.escape(self._address)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                head = '<meta charset="utf-8"><title>scalerl</title>'
                leads = f'<meta http-equiv="refresh" content="0; url={url}"><p><a href="{url}">The runs</a>'
                file.write(f'<!doctype html><html lang="en">{head}{leads}</html>\n')
            shown = self._file.as_uri()
        threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    def close(self) -> None:
        """Remove the file for the browser."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    root: Path,
    asked: StandingQuery,
    host: str,
    port: int,
    wants_token: bool,
    opens: bool,
    ready: Callable[[str], None],
    devices: Mapping[str, float] | None = None,
) -> None:
    """Serve the runs in `root` until a signal; call `ready` with the address, and open a browser if `opens`.

    `devices` has the devices of logs by patterns of their paths (`scalerl.view.serve.logs`). Every request
    needs a token if other machines can reach the server, or if `wants_token` is set.

    Raises:
        InputError: the host or the port is not available.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    bound = _bind(host, port)
    port = bound.getsockname()[1]
    local = is_loopback(host)
    token = secrets.token_urlsafe(32) if wants_token or not local else None
    hosts = _NAMES | {host.lower()} if local else None
    app, looker = make_app(RunStore(root, asked, devices), hosts, token, cookie=f"scalerl-{port}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # its lines would contain the token
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
    )
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    opening = Opening(address, secret=token is not None)

    def stop() -> None:
        opening.close()  # now, as there may be no later time after the signal
        looker.stopped.set()

    ready(address)
    try:
        if opens:  # the socket is bound, so a request can wait from here on
            opening.open()
        _Server(config, stop).run(sockets=[bound])
    finally:
        opening.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: no address of this machine ({_why(error)})") from None
    # Otherwise the port stays taken for a minute after a server with open pages has stopped.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise InputError(
            f"port {port} on {host} cannot be had: {_why(error)} (--port 0 takes a free one)"
        ) from None
    return bound


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
