"""The page and its JSON, read-only.

GET /                                    the page, and its files
GET /run/ID,ID?axis=AXIS                 the page of one run or several, as `scalerl report` writes it
GET /api/runs?since=VERSION              the runs: all ids, and the rows that have changed since
GET /api/overlay?runs=ID,ID&axis=AXIS    the data of a chart of these runs
GET /api/compare?runs=ID,ID&axis=AXIS    the comparison of these runs, as from `scalerl compare --json`
GET /events                              server-sent events: the version, whenever it changes
"""

import asyncio
import hmac
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalerl.errors import ScalerlError
from scalerl.jsonl import dumps
from scalerl.view.assets import CHART, TEMPLATES, WEB, page
from scalerl.view.serve.store import RunStore, UnknownRunError

_LOG = logging.getLogger("scalerl")
_HERE = Path(__file__).parent
_FILES = {
    "/page.js": (_HERE / "page.js", "text/javascript"),
    "/page.css": (_HERE / "page.css", "text/css"),
    "/look.css": (TEMPLATES / "look.html", "text/css"),
    "/chart.css": (WEB / "chart.css", "text/css"),
    **{f"/{name}": (WEB / name, "text/javascript") for name in (*CHART, "live.js")},
}
_BEAT = 15.0
"""Seconds after which a stream without news sends a comment, so that no proxy closes it."""
_TICK = 0.25
_SLICE = 0.25
"""Seconds for which changed runs are read in one go, before all are checked again."""
_DIGITS = 20
"""Most digits of a version."""
_MOST_STREAMS = 100
_FIRST_LOOK = 1.0
"""Seconds that a response waits for the first scan of the folder, or for the first after a rest."""
_IDLE = 20.0
"""Seconds after the last request until the folder is no longer scanned."""

# Only this server's scripts may run. The chart sets inline styles, and Plotly adds rules to a style sheet
# that is empty at first (the hash is that of an empty text).
_POLICY = (
    "default-src 'none'; script-src 'self'; "
    "style-src-elem 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::[0-9]*)?")
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Looker(threading.Thread):
    """Scans the folder and fits runs, as long as a page is open."""

    def __init__(self, store: RunStore) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.streams = 0
        self.asked = float("-inf")
        """Time of the last request."""
        self.stopped = threading.Event()
        """Set to stop it after the present scan or fit; streams then end too."""

    def run(self) -> None:
        """Scan and fit until it is stopped."""
        while not self.stopped.is_set():
            if not self.streams and time.monotonic() - self.asked > _IDLE:
                self.store.looked.clear()  # so that the next request waits for a new scan
                self.stopped.wait(_TICK)
                continue
            try:
                # Changes are shown before any fit is made, and no fit is made before everything is read once.
                more = self.store.refresh(_SLICE)
                if (self.store.looked.is_set() and self.store.fit_next()) or more:
                    continue
            except Exception:  # one run's failure must not affect the others
                _LOG.exception("while looking at %s", self.store.root)
            self.stopped.wait(_TICK)


def make_app(
    store: RunStore, hosts: Iterable[str] | None, token: str | None = None, cookie: str = "scalerl"
) -> tuple[ASGIApp, Looker]:
    """Make the application and its `Looker`; `hosts`, `token` and `cookie` are those of `Guard`."""
    looker = Looker(store)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        looker.start()
        try:
            yield
        finally:
            looker.stopped.set()

    def of_runs(answer: Callable[[list[str], str | None], Response]) -> Callable[[Request], Response]:
        """Make a handler for requests about named runs, which runs in a thread; errors become JSON."""

        def respond(request: Request) -> Response:
            looker.asked = time.monotonic()
            store.looked.wait(_FIRST_LOOK)
            ids = request.path_params.get("ids") or request.query_params.get("runs", "")
            try:
                return answer(
                    [one for one in ids.split(",") if one], request.query_params.get("axis") or None
                )
            except UnknownRunError as error:
                return _json({"error": str(error)}, 404)
            except ScalerlError as error:
                return _json({"error": str(error)}, 422)

        return respond

    async def runs(request: Request) -> Response:
        looker.asked = time.monotonic()
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= _DIGITS):
            return _json({"error": "since: expected a version, a whole number"}, 400)
        # The response has the runs found so far; events announce the rest.
        await run_in_threadpool(store.looked.wait, _FIRST_LOOK)
        return await run_in_threadpool(lambda: _json(store.listed(int(since))))

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        # Each stream holds a connection as long as its page is open.
        if looker.streams >= _MOST_STREAMS:
            return _json({"error": "too many pages are open"}, 503)
        return StreamingResponse(_versions(looker, request), media_type="text/event-stream")

    def send_file(path: Path, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(path.read_bytes(), media_type=kind)

    routes = [
        Route("/", lambda request: _html(_list_page())),
        *(Route(path, send_file(*file)) for path, file in _FILES.items()),
        Route("/run/{ids}", of_runs(lambda ids, axis: _html(store.page(ids, axis)))),
        Route("/api/runs", runs),
        Route("/api/overlay", of_runs(lambda ids, axis: _json(store.overlay(ids, axis)))),
        Route("/api/compare", of_runs(lambda ids, axis: _json(store.compare(ids, axis)))),
        Route("/events", events),
    ]
    broken = {"error": "the server is at fault: its log says how"}
    handlers = {Exception: lambda request, error: _json(broken, 500)}
    inner = Starlette(routes=routes, lifespan=life, exception_handlers=handlers)
    # Outermost, as a middleware would not see the response to an unforeseen exception.
    return Guard(inner, hosts, token, cookie), looker


def _list_page() -> str:
    scripts = [(name, "") for name in (*CHART, "page.js") if name != "start.js"]
    return page("list.html", {"linked": "./", "name": "runs", "scripts": scripts})


def _html(text: str) -> Response:
    return Response(text, media_type="text/html")


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(data), status, headers, media_type="application/json")


async def _versions(looker: Looker, request: Request) -> AsyncIterator[str]:
    looker.streams += 1
    sent, since = 0, time.monotonic()
    try:
        while not (looker.stopped.is_set() or await request.is_disconnected()):
            if looker.store.version != sent:
                sent, since = looker.store.version, time.monotonic()
                yield f"data: {sent}\n\n"
            elif time.monotonic() - since > _BEAT:
                since = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_TICK)
    finally:
        looker.streams -= 1


class Guard:
    """Guards requests and sets the headers of every response: read-only, local names, or a token.

    Without a token only requests to a name of this machine are answered, as a foreign page whose name points
    here (DNS rebinding) sends that name. With a token any name is accepted. `hosts` are the accepted names
    without a port; None accepts any.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] | None = None, token: str | None = None, cookie: str = ""
    ) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""
        if scope["type"] != "http":  # "lifespan": start and end; there are no other connections
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers, new = Headers(scope=scope), ""
        refused = self._refused(scope["method"], headers.getlist("host"))
        if refused is None and self._token is not None:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            if self._is_token(query.get("token", [""])[0]):
                new = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            elif not self._is_known(headers):
                needed = "a token is needed: open the address that the server has printed"
                refused = _json({"error": needed}, 401)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(_HEADERS)
                if new:
                    found.append("Set-Cookie", new)
            await send(message)

        await (refused or self._app)(scope, receive, answer)

    def _refused(self, method: str, hosts: list[str]) -> Response | None:
        if method not in ("GET", "HEAD"):
            return _json({"error": "this server only shows"}, 405, {"Allow": "GET, HEAD"})
        if self._hosts is not None and (len(hosts) != 1 or _name(hosts[0]) not in self._hosts):
            return _json({"error": "asked under a name that is not of this machine"}, 400)
        return None

    def _is_known(self, headers: Headers) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(value.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return self._cookie in cookies and self._is_token(cookies[self._cookie].value)

    def _is_token(self, text: str) -> bool:
        return self._token is not None and hmac.compare_digest(text.encode(), self._token.encode())


def _name(host: str) -> str:
    """Return a Host header without its port; empty if it is invalid."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""
