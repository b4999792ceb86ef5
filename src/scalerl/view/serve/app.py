"""The page and its JSON, read-only.

GET /                                    the page, and its files
GET /run/ID,ID?axis=AXIS                 the page of a run or of several, as `scalerl report` writes it
GET /api/runs?since=VERSION              the runs: all ids, and the rows that have changed since
GET /api/overlay?runs=ID,ID&axis=AXIS    what a chart of these runs shows
GET /api/compare?runs=ID,ID&axis=AXIS    the comparison of these runs, as `scalerl compare --json` has it
GET /events                              server-sent events: the version, whenever it is another
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from scalerl.errors import ScalerlError
from scalerl.jsonl import dumps
from scalerl.view.assets import CHART, TEMPLATES, WEB, page
from scalerl.view.serve.guard import Guard
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
"""Seconds after which a stream without news sends a line all the same, so that no proxy closes it."""
_TICK = 0.25
_SLICE = 0.25
"""Seconds for which changed runs are read at a stretch, before all are looked at again."""
_DIGITS = 20
"""Of a version, at most."""
_MOST_STREAMS = 100
_FIRST_LOOK = 1.0
"""Seconds that the list waits for the first look at the folder to be done."""
_IDLE = 20.0
"""Seconds after the last request from which on the folder is not looked at."""


class Looker:
    """The thread that looks at the folder and fits, as long as a page is open."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.streams = 0
        self._touched = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it after the present look or fit."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called: streams end then."""
        return self._stop.is_set()

    def touch(self) -> None:
        """Note that a request has come."""
        self._touched = time.monotonic()

    def _work(self) -> None:
        while not self.stopped:
            if not self.streams and time.monotonic() - self._touched > _IDLE:
                self._stop.wait(_TICK)
                continue
            try:
                # What has changed is shown before any fit is made; until all is read once, nothing is fitted.
                more = self.store.refresh(_SLICE)
                if (self.store.looked.is_set() and self.store.fit_next()) or more:
                    continue
            except Exception:  # of one run: the others go on
                _LOG.exception("while looking at %s", self.store.root)
            self._stop.wait(_TICK)


def make_app(
    store: RunStore, hosts: Iterable[str] | None, token: str | None = None, cookie: str = "scalerl"
) -> tuple[ASGIApp, Looker]:
    """Make the application, and its `Looker`. `hosts`, `token` and `cookie` are those of `Guard`."""
    looker = Looker(store)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        looker.start()
        try:
            yield
        finally:
            looker.stop()

    routes = [
        Route("/", lambda request: Response(_list_page(), media_type="text/html")),
        *(Route(path, _file(*file)) for path, file in _FILES.items()),
        Route("/run/{ids}", _page(looker)),
        Route("/api/runs", _runs(looker)),
        Route("/api/overlay", _of_several(looker, store.overlay)),
        Route("/api/compare", _of_several(looker, store.compare)),
        Route("/events", _events(looker)),
    ]
    inner = Starlette(routes=routes, lifespan=life, exception_handlers={Exception: _broken})
    # Around all of it: as a middleware it would not see the answer to an unforeseen exception.
    return Guard(inner, hosts, token, cookie), looker


def _list_page() -> str:
    scripts = [(name, "") for name in (*CHART, "page.js") if name not in ("panels.js", "start.js")]
    return page("list.html", {"linked": "./", "name": "runs", "scripts": scripts})


def _broken(request: Request, error: Exception) -> Response:
    return _json({"error": "the server is at fault: its log says how"}, 500)


def _file(path: Path, kind: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return Response(path.read_bytes(), media_type=kind)

    return answer


def _json(data: Any, status: int = 200) -> Response:
    return Response(dumps(data), status, media_type="application/json")


def _runs(looker: Looker) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        looker.touch()
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= _DIGITS):
            return _json({"error": "since: expected a version, a whole number"}, 400)
        # The answer holds what the looker has found so far; its events announce the rest.
        await run_in_threadpool(looker.store.looked.wait, _FIRST_LOOK)
        return await run_in_threadpool(lambda: _json(looker.store.listed(int(since))))

    return answer


def _answered(looker: Looker, respond: Callable[[Request], Response]) -> Callable[[Request], Any]:
    """Return `respond` with its errors as JSON."""

    def answer(request: Request) -> Response:
        looker.touch()
        try:
            return respond(request)
        except UnknownRunError as error:
            return _json({"error": str(error)}, 404)
        except ScalerlError as error:
            return _json({"error": str(error)}, 422)

    return answer  # no coroutine: it is run in a thread


def _of_several(
    looker: Looker, query: Callable[[list[str], str | None], dict[str, Any]]
) -> Callable[[Request], Any]:
    def respond(request: Request) -> Response:
        ids = [one for one in request.query_params.get("runs", "").split(",") if one]
        return _json(query(ids, request.query_params.get("axis") or None))

    return _answered(looker, respond)


def _page(looker: Looker) -> Callable[[Request], Any]:
    def respond(request: Request) -> Response:
        ids, axis = request.path_params["ids"].split(","), request.query_params.get("axis") or None
        return Response(looker.store.page(ids, axis), media_type="text/html")

    return _answered(looker, respond)


def _events(looker: Looker) -> Callable[[Request], Any]:
    async def stream(request: Request) -> AsyncIterator[str]:
        looker.streams += 1
        sent, since = 0, time.monotonic()
        try:
            while not (looker.stopped or await request.is_disconnected()):
                if looker.store.version != sent:
                    sent, since = looker.store.version, time.monotonic()
                    yield f"data: {sent}\n\n"
                elif time.monotonic() - since > _BEAT:
                    since = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(_TICK)
        finally:
            looker.streams -= 1

    async def answer(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        # Each holds a connection for as long as its page is open.
        if looker.streams >= _MOST_STREAMS:
            return JSONResponse({"error": "too many pages are open"}, 503)
        return StreamingResponse(stream(request), media_type="text/event-stream")

    return answer
