"""Who gets what of the server: names and tokens, what is never written, and links out of the folder."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from growing import Growing
from serve_client import LOCAL, serving, settled
from starlette.responses import JSONResponse

from scalerl.view.serve.app import Guard
from scalerl.view.serve.listing import Listing

TOKEN = "t" * 43


API = ("/", "/page.js", "/chart.js", "/api/runs", "/api/overlay?runs=x", "/api/compare?runs=x", "/events")


@pytest.fixture(scope="module")
def guarded(original):
    with serving(original, hosts=None, token=TOKEN) as client:
        yield client


def snapshot(folder):
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def test_nothing_is_written(original, client):
    before = snapshot(original)
    rows = settled(client)
    ids = ",".join(row["id"] for row in rows.values())
    for path in ("/", f"/api/overlay?runs={ids}", f"/api/compare?runs={ids}"):
        assert client.get(path).status_code == 200
    assert snapshot(original) == before


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", API)
def test_it_only_shows(client, method, path):
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "asked",
    [
        *("..", "../a", "a/a-0", "%2e%2e", "%2e%2e%2fa", "/etc", "//etc/passwd", "a-0", "\x00", "a%00", "."),
        *("..%5c..", "1ec9ba11da3e4b8b/..", "x" * 5000),
    ],
)
def test_a_run_is_looked_up_and_no_path(client, asked):
    settled(client)
    for name in ("overlay", "compare"):
        assert client.get(f"/api/{name}", params={"runs": asked}).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/a/a-0/evals.jsonl", "/page.js/..%2fguard.py"],
)
def test_files_are_those_of_the_page_alone(client, path):
    assert client.get(path).status_code == 404


def test_links_out_of_the_folder_are_refused(runs):
    outside = Growing(runs.parent / "outside", 6)
    (runs / "link").symlink_to(outside.path)
    (runs / "file").mkdir()
    (runs / "file" / "evals.jsonl").symlink_to(outside.path / "evals.jsonl")
    (runs / "within").mkdir()
    (runs / "within" / "evals.jsonl").symlink_to(runs / "a" / "a-0" / "evals.jsonl")
    with serving(runs) as client:
        rows = settled(client)
    assert "link" not in rows
    assert "leads out" in rows["file"]["error"]
    assert "pass_rate" in rows["file"]
    assert rows["file"]["pass_rate"] is None
    assert rows["within"]["evaluations"] == 30


@pytest.mark.parametrize(
    ("link", "to_folder"),
    [
        ("wandb/run-2-b.log", True),
        ("wandb/run-2-b/debug-core.log", True),
        ("wandb/run-2-b/run-b.log", False),
        ("wandb/wandb/run-2-b", True),
        ("wandb/wandb/run-2-b/run-b.wandb", False),
    ],
)
def test_links_out_of_a_folder_of_wandb_are_refused_where_a_reader_would_look(tmp_path, link, to_folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run-b.wandb").write_bytes(b"")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run-a.wandb").write_bytes(b"")
    place = tmp_path / "runs" / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside if to_folder else outside / "run-b.wandb")
    (entry,) = Listing(tmp_path / "runs").scan().values()
    assert entry.refused == f"{place.name} is a link that leads out of the folder"


def test_a_link_to_itself_and_the_log_of_wandb_are_no_fault(tmp_path):
    (tmp_path / "core.log").write_text("")
    run = tmp_path / "runs" / "wandb" / "run-1-a"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "debug-core.log").symlink_to(tmp_path / "core.log")
    (run / "loop").symlink_to(run / "loop")
    (run / "run-a.wandb").write_bytes(b"")
    (entry,) = Listing(tmp_path / "runs").scan().values()
    assert entry.refused == ""


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "", "localhost.", "[::2]:80", "127.0.0.2"),
        *("[::1].evil.example", "[::1]:80.evil.example", "[::1", "::1", "[localhost]x", "[::1]]", "[[::1]]"),
        *("localhost:evil", "localhost:80:80", "localhost:80.evil.example", "localhost:-1", ":80", "[]"),
    ],
)
def test_another_name_of_this_machine_is_not_answered(client, host):
    assert client.get("/api/runs", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("hosts", [["localhost", "localhost"], ["localhost", "evil.example"], []])
def test_a_request_has_one_name(hosts):
    """No client sends what this is about: it is asked as a server hands it on."""
    told = []

    async def inner(scope, receive, send):
        await JSONResponse({})(scope, receive, send)

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        told.append(message.get("status"))

    headers = [(b"host", host.encode()) for host in hosts]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}

    async def ask(headers):
        await Guard(inner, LOCAL)(scope | {"headers": headers}, receive, send)
        return told.pop(0)

    with ThreadPoolExecutor(1) as thread:  # in this one a browser may have left a loop of its own
        assert thread.submit(lambda: asyncio.run(ask(headers))).result() == 400
        told.clear()
        assert thread.submit(lambda: asyncio.run(ask([(b"host", b"localhost")]))).result() == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8787", "127.0.0.1:1", "[::1]:8787", "[::1]"])
def test_the_names_of_this_machine_are(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", API)
def test_without_the_token_nothing_is_told(guarded, path):
    for wrong in ({}, {"Authorization": "Bearer x"}, {"Cookie": "scalerl-1=x"}, {"Cookie": '"\x01='}):
        answer = guarded.get(path, headers=wrong)
        assert answer.status_code == 401
        assert "a-0" not in answer.text
    assert guarded.get(f"{path}{'&' if '?' in path else '?'}token=x").status_code == 401


def test_with_the_token_a_browser_goes_on_by_cookie(guarded):
    assert guarded.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    answer = guarded.get(f"/?token={TOKEN}", headers={"Host": "cluster.example"})
    guarded.cookies.clear()
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie == f"scalerl-1={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert guarded.get("/api/runs", headers={"Cookie": f"scalerl-1={TOKEN}"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/runs", "/api/overlay?runs=x", "/nowhere"])
def test_every_answer_says_what_it_may_load(client, path):
    headers = client.get(path, headers={"Origin": "https://evil.example"}).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_the_page_loads_nothing_from_elsewhere(client):
    for path in ("/", "/page.js", "/page.css", "/look.css", "/chart.css"):
        text = client.get(path).text
        assert "https://" not in text
        assert "<script>" not in text
        assert "onclick" not in text
