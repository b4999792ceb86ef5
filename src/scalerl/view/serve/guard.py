"""Which requests are answered, and the headers of every answer: read-only, local names, or a token.

Without a token only requests to a name of this machine are answered: a page elsewhere that has its own name
point here (DNS rebinding) asks under that name. With a token any name will do.
"""

import hmac
import re
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No script but those of this server. The chart sets styles of single elements; and Plotly adds rules to a
# style sheet that is empty as it comes (the hash is that of nothing).
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


class Guard:
    """Around the whole application. `hosts` are the names without a port that are answered; None is any."""

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] | None = None, token: str | None = None, cookie: str = ""
    ) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":  # the start and the end; there are no other connections
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
                refused = JSONResponse(
                    {"error": "a token is needed: open the address that the server has printed"}, 401
                )

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(_HEADERS)
                if new:
                    found.append("Set-Cookie", new)
            await send(message)

        await (refused or self._app)(scope, receive, answer)

    def _refused(self, method: str, hosts: list[str]) -> JSONResponse | None:
        if method not in ("GET", "HEAD"):
            return JSONResponse({"error": "this server only shows"}, 405, {"Allow": "GET, HEAD"})
        if self._hosts is not None and (len(hosts) != 1 or _name(hosts[0]) not in self._hosts):
            return JSONResponse({"error": "asked under a name that is not of this machine"}, 400)
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
    """A Host header without its port; empty where it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""
