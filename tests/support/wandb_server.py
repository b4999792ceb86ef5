"""A server of W&B on this machine: it answers what W&B's own client sends, by GraphQL and as Parquet files.

Every query is held against `SCHEMA`, the part of W&B's schema that wandb 0.31.0 uses to read runs, and what
is not in it is refused as W&B's server refuses it. Rows are exported as Parquet up to `exported`; those after
it are sent by GraphQL, and of these only the ones that have all metrics that are asked for, as W&B does.
"""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pyarrow as arrow
from pyarrow import parquet

KEY = "0123456789" * 4
SCHEMA = """
type Query {
  viewer: User
  project(name: String, entityName: String): Project
}
type User {
  id: ID entity: String username: String name: String email: String flags: JSONString teams: Entities
}
type Entities { edges: [EntityEdge] }
type EntityEdge { node: Entity }
type Entity { name: String }
type Project {
  internalId: ID
  runCount(filters: JSONString): Int
  readOnly: Boolean
  run(name: String): Run
  runs(filters: JSONString, after: String, first: Int, order: String): RunConnection
}
type RunConnection { edges: [RunEdge] pageInfo: PageInfo }
type RunEdge { node: Run cursor: String }
type PageInfo { endCursor: String hasNextPage: Boolean }
type Run {
  id: ID projectId: ID tags: [String] name: String displayName: String sweepName: String state: String
  config: JSONString group: String jobType: String commit: String readOnly: Boolean createdAt: DateTime
  heartbeatAt: DateTime description: String notes: String systemMetrics: JSONString summaryMetrics: JSONString
  historyLineCount: Int user: User historyKeys: JSON
  parquetHistory(liveKeys: [String]): ParquetHistory
  history(minStep: Int64, maxStep: Int64, samples: Int): [JSONString]
  sampledHistory(specs: [JSONString]): [JSON]
}
type ParquetHistory { parquetUrls: [String] liveData: [JSON] }
"""


@dataclass
class Stored:
    """A run on the server; every row has a `_step` and a `_timestamp`."""

    id: str
    name: str
    rows: list[dict[str, Any]]
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exported: int = 0
    """The first rows, which are in a Parquet file."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of values, where the server counts others than there are."""


class WandbServer:
    """Serves the runs of one project, `team/rl`."""

    def __init__(self, *runs: Stored) -> None:
        self.runs = list(runs)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """The operations that were asked for, with their variables."""
        self.keys: set[str] = set()
        self.status, self.hangs = 200, False
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.hangs = False
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def scanned(self) -> list[list[str]]:
        """The metrics of every request for rows."""
        specs = [
            json.loads(variables["spec"]) for name, variables in self.asked if name == "SampledHistoryPage"
        ]
        return [[key for key in dict.fromkeys(spec["keys"]) if not key.startswith("_")] for spec in specs]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        document = _Document(query)
        given = document.defaults | variables
        self.asked.append((document.name, variables))
        return {"data": _selected(document, document.selection, "Query", self._root(), given)}

    def parquet(self, id: str) -> bytes:
        run = next(run for run in self.runs if run.id == id)
        out = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(_columns(run.rows[: run.exported])), out)
        return out.getvalue()

    def _root(self) -> dict[str, Any]:
        user = {"id": "u", "entity": "team", "username": "user", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": user, "project": self._project}

    def _project(self, name: str, entityName: str) -> Any:
        if (entityName, name) != ("team", "rl"):
            return None
        return {
            "internalId": "1",
            "readOnly": False,
            "runCount": lambda filters: len(self._matching(filters)),
            "run": lambda name: next((self._run(run) for run in self.runs if run.id == name), None),
            "runs": self._page,
        }

    def _matching(self, filters: str | None) -> list[Stored]:
        return [run for run in self.runs if _matches(run, json.loads(filters or "{}"))]

    def _page(self, filters: str, first: int, order: str, after: str | None = None) -> dict[str, Any]:
        assert order == "+created_at"
        found, start = self._matching(filters), int(after or 0)
        edges = [
            {"node": self._run(run), "cursor": str(n)}
            for n, run in enumerate(found[start : start + first], start=start + 1)
        ]
        return {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": start + first < len(found)}}

    def _run(self, run: Stored) -> dict[str, Any]:
        counts = Counter(key for row in run.rows for key in row) | Counter(run.counts)
        keys = {key: {"typeCounts": [{"type": "number", "count": n}]} for key, n in counts.items()}
        last = max((row["_step"] for row in run.rows), default=-1)
        return dict.fromkeys(("sweepName", "jobType", "commit", "description", "notes")) | {
            **{"tags": [], "user": {"name": "A User", "username": "user"}},
            **{"id": f"storage-{run.id}", "projectId": "1", "name": run.id, "displayName": run.name},
            **{"state": "finished", "group": run.group, "readOnly": False, "systemMetrics": "{}"},
            **{"createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00"},
            "config": json.dumps({key: {"value": value} for key, value in run.config.items()}),
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.rows),
            "historyKeys": {"keys": keys, "lastStep": last, "sets": []} if run.rows else None,
            "parquetHistory": lambda liveKeys: self._exported(run),
            "history": lambda minStep, maxStep, samples: [
                json.dumps(row) for row in _between(_live(run), minStep, maxStep)[:samples]
            ],
            "sampledHistory": lambda specs: [_sampled(_live(run), json.loads(spec)) for spec in specs],
        }

    def _exported(self, run: Stored) -> dict[str, Any]:
        urls = [f"{self.url}/parquet/{run.id}"] if run.exported else []
        return {"parquetUrls": urls, "liveData": [{"_step": row["_step"]} for row in _live(run)]}


def _live(run: Stored) -> list[dict[str, Any]]:
    return run.rows[run.exported :]


def _columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _between(rows: list[dict[str, Any]], low: int, high: int) -> list[dict[str, Any]]:
    return [row for row in rows if low <= row["_step"] < high]


def _sampled(rows: list[dict[str, Any]], spec: dict[str, Any]) -> list[dict[str, Any]]:
    keys = set(spec["keys"])
    found = [row for row in _between(rows, spec["minStep"], spec["maxStep"] + 1) if keys <= row.keys()]
    return [{key: row[key] for key in keys} for row in found[: spec["samples"]]]


def _matches(run: Stored, filters: dict[str, Any]) -> bool:
    values = {"name": run.id, "displayName": run.name, "group": run.group}
    return all(
        any(_matches(run, one) for one in value) if key == "$or" else values[key] == value
        for key, value in filters.items()
    )


class RefusedError(Exception):
    """What a query has that the schema has not."""


_TOKEN = re.compile(r'\s+|#[^\n]*|(\.\.\.|[A-Za-z_]\w*|\$\w+|-?\d+|"[^"]*"|[{}()\[\]:=!@])|,')
_TYPES = {
    name: {
        found[1]: (found[3], set(re.findall(r"(\w+):", found[2] or "")))
        for found in re.finditer(r"(\w+)(\([^)]*\))?: \[?(\w+)\]?", body)
    }
    for name, body in re.findall(r"type (\w+) \{(.*?)\}", SCHEMA, re.DOTALL)
}


class _Document:
    """A query: its name, the fields that it selects, its fragments and the defaults of its variables."""

    def __init__(self, text: str) -> None:
        self._tokens = [found[1] for found in _TOKEN.finditer(text) if found[1]]
        assert "".join(self._tokens) == re.sub(r"#[^\n]*|[\s,]", "", text)
        self._at = 0
        self.fragments: dict[str, tuple[str, list[Any]]] = {}
        self.defaults: dict[str, Any] = {}
        while self._at < len(self._tokens):
            kind = self._next()
            if kind == "fragment":
                name, _, on = self._next(), self._next(), self._next()
                self.fragments[name] = on, self._fields()
                continue
            assert kind == "query", kind
            self.name = self._next()
            if self._peek() == "(":
                self._variables()
            self.selection = self._fields()

    def _peek(self) -> str:
        return self._tokens[self._at]

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _variables(self) -> None:
        name = ""
        while (token := self._next()) != ")":
            if token.startswith("$"):
                name = token[1:]
            elif token == "=":
                self.defaults[name] = json.loads(self._next())

    def _fields(self) -> list[Any]:
        assert self._next() == "{"
        fields: list[Any] = []
        while (name := self._next()) != "}":
            if name == "...":
                fields.append(self._next())
                continue
            arguments: dict[str, Any] = {}
            if self._peek() == "(":
                self._next()
                while (key := self._next()) != ")":
                    assert self._next() == ":"
                    arguments[key] = self._value()
            fields.append((name, arguments, self._fields() if self._peek() == "{" else None))
        return fields

    def _value(self) -> Any:
        token = self._next()
        if token != "[":
            return token
        values = []
        while self._peek() != "]":
            values.append(self._value())
        self._next()
        return values


def _flat(document: _Document, selection: list[Any], type_name: str) -> Iterator[Any]:
    for one in selection:
        if isinstance(one, str):
            on, fields = document.fragments[one]
            assert on == type_name, f"a fragment on {on} in a {type_name}"
            yield from _flat(document, fields, type_name)
        else:
            yield one


def _selected(document: _Document, selection: list[Any], type_name: str, value: Any, given: dict) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_selected(document, selection, type_name, one, given) for one in value]
    answer = {}
    for name, arguments, below in _flat(document, selection, type_name):
        if name not in _TYPES[type_name]:
            raise RefusedError(f'Cannot query field "{name}" on type "{type_name}".')
        kind, known = _TYPES[type_name][name]
        if arguments.keys() - known:
            raise RefusedError(f'Unknown argument "{min(arguments.keys() - known)}" on field "{name}".')
        if (below is not None) != (kind in _TYPES):
            raise RefusedError(f'Field "{name}" of type "{kind}": wrong selection.')
        found = value.get(name)
        if callable(found):
            found = found(**{key: _bound(one, given) for key, one in arguments.items()})
        answer[name] = found if below is None else _selected(document, below, kind, found, given)
    return answer


def _bound(value: Any, given: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_bound(one, given) for one in value]
    return given.get(value[1:]) if value.startswith("$") else json.loads(value)


class _Handler(BaseHTTPRequestHandler):
    server_of: WandbServer

    def do_POST(self) -> None:
        server = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.keys.add(self.headers["Authorization"])
        while server.hangs:
            time.sleep(0.05)
        if server.status != 200:
            return self._send(server.status, b"{}", "application/json")
        try:
            answer = server.answer(body["query"], body.get("variables") or {})
        except RefusedError as error:
            answer = {"errors": [{"message": str(error)}]}
        return self._send(200 if "data" in answer else 400, json.dumps(answer).encode(), "application/json")

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        self._file()

    def _file(self) -> None:
        data = self.server_of.parquet(urlsplit(self.path).path.rpartition("/")[2])
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return self._send(200, data, "application/octet-stream")
        part = data[int(span[1]) : int(span[2]) + 1]
        whole = f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(data)}"
        return self._send(206, part, "application/octet-stream", {"Content-Range": whole})

    def _send(self, status: int, data: bytes, kind: str, more: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
