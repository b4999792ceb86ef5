"""The socket of a server, its address, and an end at once."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from scalerl.errors import InputError
from scalerl.view.serve.app import make_app
from scalerl.view.serve.opening import Opening
from scalerl.view.serve.store import RunStore

if TYPE_CHECKING:
    from scalerl.view.facts.standing import StandingQuery

_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class _Server(uvicorn.Server):
    """Ends at the first signal: streams that are open are told to, as they would never end by themselves."""

    def __init__(self, config: uvicorn.Config, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(config)
        self._begin, self._end = begin, end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """From here on requests are answered."""
        await super().startup(sockets)
        if self.started:
            self._begin()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end has come."""
        self._end()
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
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
) -> None:
    """Serve the runs in `root` until a signal comes. `ready` is told the address; a browser `opens` it.

    A token is needed for every answer where others than this machine reach the server, or where it is wanted.

    Raises:
        InputError: the host or the port cannot be had.
        KeyboardInterrupt: it was ended by Ctrl-C.
    """
    bound = _bind(host, port)
    port = bound.getsockname()[1]
    local = is_loopback(host)
    token = secrets.token_urlsafe(32) if wants_token or not local else None
    hosts = _NAMES | {host.lower()} if local else None
    app, looker = make_app(RunStore(root, asked), hosts, token, cookie=f"scalerl-{port}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # its lines would hold the token
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
    )
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    opening = Opening(address, secret=token is not None)

    def end() -> None:
        opening.close()  # here, as the signal may leave no later time
        looker.stop()

    ready(address)
    try:
        _Server(config, opening.open if opens else lambda: None, end).run(sockets=[bound])
    finally:
        opening.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: no address of this machine ({_why(error)})") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(128)  # from here on a request waits for its answer
    except OSError as error:
        bound.close()
        raise InputError(
            f"port {port} on {host} cannot be had: {_why(error)} (--port 0 takes a free one)"
        ) from None
    return bound


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
