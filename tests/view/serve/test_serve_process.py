"""The server as a process: its address, a stream that is open when it ends, what stands in its way."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn
from growing import Growing
from serve_process import server

from scalerl.cli.main import main
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve.app import make_app
from scalerl.view.serve.server import is_loopback
from scalerl.view.serve.store import RunStore


def until(condition):
    """Wait for something, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stream_tells_what_changes_and_ends_with_the_server(runs):
    growing = Growing(runs / "c", 5)
    with server(runs) as (process, address), httpx.Client(base_url=address, timeout=60) as client:
        with client.stream("GET", "/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            told = int(next(lines).removeprefix("data: "))
            growing.grow()
            steps = set()
            while 100 not in steps:
                assert int(next(lines).removeprefix("data: ")) > told
                rows = client.get("/api/runs").json()["runs"]
                steps = {row["step"] for row in rows if row["path"] == "c"}
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            with contextlib.suppress(httpx.RemoteProtocolError):
                for line in lines:  # of what had grown by then; it ends with the server
                    assert int(line.removeprefix("data: ")) > told
        out, err = process.communicate()
        assert (out, err) == ("", "")


def test_streams_that_are_left_are_let_go(runs):
    app, looker = make_app(RunStore(runs, StandingQuery()), None)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        until(lambda: running.started)
        for _ in range(5):
            with httpx.stream("GET", f"{address}/events", timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert looker.streams >= 1
        until(lambda: not looker.streams)
    finally:
        looker.stopped.set()
        running.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def test_others_than_this_machine_need_the_token(runs):
    with server(runs, "--host", "0.0.0.0") as (_, address):
        found = re.fullmatch(r"http://[^/:]+:(\d+)/\?token=([\w-]{43})", address)
        assert found
        here = f"http://127.0.0.1:{found[1]}"
        assert httpx.get(f"{here}/api/runs", timeout=60).status_code == 401
        with httpx.Client(base_url=here, timeout=60) as client:
            assert client.get(f"/?token={found[2]}").status_code == 200
            assert client.get("/api/runs").status_code == 200


@pytest.fixture
def browser(tmp_path):
    """A browser that ends once it has loaded what it is told to; what that was is in `told`."""
    program, told = tmp_path / "browser", tmp_path / "told"
    program.write_text(f"""#!{sys.executable}
import pathlib, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as page:
    loaded = page.read().decode()
pathlib.Path("{told}.part").write_text(sys.argv[1] + "\\n" + loaded)
pathlib.Path("{told}.part").rename("{told}")
""")
    program.chmod(0o755)
    return program, told


def opened(told):
    """The address that the browser was told, and the page that it loaded."""
    for _ in range(1200):
        if told.exists():
            break
        time.sleep(0.05)
    address, _, page = told.read_text().partition("\n")
    return address, page


def test_the_page_is_opened_in_a_browser_that_ends_only_after_it_has_loaded(runs, browser):
    program, told = browser
    with server(runs, "--open", BROWSER=str(program)) as (process, address):
        shown, page = opened(told)
        assert shown == address
        assert "<title>" in page
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_browser_is_not_told_the_token_where_others_see_it(runs, browser, tmp_path, number):
    program, told = browser
    aside = tmp_path / "temporary"
    aside.mkdir()
    words = ("--token", "--open")
    with server(runs, *words, BROWSER=str(program), TMPDIR=str(aside)) as (process, address):
        shown, page = opened(told)
        (file,) = aside.iterdir()
        assert shown == file.as_uri()
        assert file.stat().st_mode & 0o777 == 0o600
        (link,) = re.findall(r'content="0; url=([^"]+)"', page)
        assert link == address
        assert httpx.get(link, timeout=60).status_code == 200
        process.send_signal(number)
        process.wait(10)
        assert list(aside.iterdir()) == []
        assert process.stderr.read() == ""


def test_a_token_on_this_machine_where_it_is_asked_for(runs):
    with server(runs, "--token") as (_, address):
        assert "?token=" in address
        assert httpx.get(address.partition("?")[0], timeout=60).status_code == 401
        assert httpx.get(address, timeout=60).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_hosts_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example", ""])
def test_other_hosts(host):
    assert not is_loopback(host)


def test_errors_are_one_line(runs, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(runs), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"scalerl: port {port} on 127.0.0.1 cannot be had: Address already in use")
    assert err.count("\n") == 1
    assert main(["serve", str(runs), "--host", "no.such.host.invalid", "--port", "0"]) == 2
    assert "--host no.such.host.invalid: no address" in capsys.readouterr().err
    assert main(["serve", str(runs / "nothing")]) == 2
    assert capsys.readouterr().err == f"scalerl: {runs / 'nothing'}: no such folder\n"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_the_extra_that_is_missing_is_named(runs, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from scalerl.cli.main import main; "
    code += f"sys.exit(main(['serve', {str(runs)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"scalerl: serve needs {missing}: pip install 'scalerl[serve]'\n"
