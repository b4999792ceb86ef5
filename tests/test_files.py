"""What is at a path has changed, or is to be read again though it has not."""

import itertools
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from scalerl import InputError, files
from scalerl.files import Changing, signature, write_atomically
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions
from scalerl.jsonl import read_last
from scalerl.record.writer import RunWriter


@pytest.fixture
def clock(monkeypatch):
    """The time as the tests set it."""
    now = [1000.0]
    monkeypatch.setattr(files, "monotonic", lambda: now[0])
    return now


def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path):
    """A renamed file would replace /dev/null for the whole system, where root asks for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/scalerl-page")):
        with pytest.raises(OSError, match="a device, a pipe or a socket; expected the name of a file"):
            write_atomically(path, "a page")
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_nothing_is_written_through_a_link_that_was_there(tmp_path, monkeypatch):
    outside, page = tmp_path / "outside", tmp_path / "run" / "report.html"
    outside.write_text("mine")
    page.parent.mkdir()
    (page.parent / ".report.html.part").symlink_to(outside)
    (page.parent / f".{bytes(8).hex()}.part").symlink_to(outside)
    monkeypatch.setattr("os.urandom", bytes)
    with pytest.raises(FileExistsError):
        write_atomically(page, "a page")
    monkeypatch.undo()
    write_atomically(page, "a page")
    assert (outside.read_text(), page.read_text(), page.is_symlink()) == ("mine", "a page", False)
    assert len(list(page.parent.iterdir())) == 3


def test_two_writers_of_one_path_do_not_tear_each_other(tmp_path):
    page = tmp_path / "page"

    def parts():
        yield "one "
        write_atomically(page, "another, whole")
        assert page.read_text() == "another, whole"
        yield "and the rest"

    write_atomically(page, parts())
    assert page.read_text() == "one and the rest"
    assert list(tmp_path.iterdir()) == [page]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    def parts():
        yield "half"
        raise ZeroDivisionError

    page = tmp_path / "page"
    page.write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_atomically(page, parts())
    assert (page.read_text(), list(tmp_path.iterdir())) == ("before", [page])


def test_a_run_that_was_killed_as_it_began_can_be_begun_again(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: os._exit(9))
    if (process := os.fork()) == 0:
        RunWriter(tmp_path, {})
    monkeypatch.undo()
    os.waitpid(process, 0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    RunWriter(tmp_path, {}).close()
    assert (tmp_path / "config.json").is_file()


def test_a_page_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "page", "text")
    assert (tmp_path / "page").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_a_row_in_the_log_beside_a_database_is_a_change(tmp_path, whole):
    store = tmp_path / "project.db"
    with closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE metrics (run_name TEXT, step INTEGER, timestamp TEXT, metrics TEXT)")
        source = Changing(tmp_path if whole else store)
        told = []
        for step in range(4):
            with database:
                row = ("a", step, "2023-11-14T22:13:20+00:00", '{"eval_reward": 0.5}')
                database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?)", row)
            found = source.read(lambda: read_source(source.path, ReadOptions(format="trackio")))
            runs = found.runs if found else []
            told += [len(run.evals) for run in runs]
            assert source.read(lambda: pytest.fail("it was read, which is no change")) is None
    assert told == [1, 2, 3, 4]


def test_what_is_nowhere_has_no_signature(tmp_path):
    assert signature(tmp_path / "nothing") is None


def test_a_failure_that_heals_without_a_trace_is_tried_again_ever_more_seldom(tmp_path, clock):
    log = tmp_path / "log"
    log.write_text("bad!")
    stat = log.stat()
    source, tries = Changing(log), []

    def read():
        tries.append(clock[0])
        if log.read_text() != "good":
            raise InputError("damaged")
        return "good"

    for _ in range(4000):
        with suppress(InputError):
            assert source.read(read) is None
        clock[0] += 0.1
    waits = [round(b - a) for a, b in itertools.pairwise(tries)]
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(waits[7:]) == {60}
    log.write_text("good")
    os.utime(log, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    clock[0] += 60
    assert source.read(read) == "good"
    clock[0] += 1000
    assert source.read(read) is None


def test_a_change_is_read_at_once_and_its_failure_waits_anew(tmp_path, clock):
    log = tmp_path / "log"
    source = Changing(log)

    def read():
        raise InputError(log.read_text())

    for text in ("one", "three"):
        log.write_text(text)
        for wait in (1, 2, 4):
            with pytest.raises(InputError, match=text):
                source.read(read)
            clock[0] += wait - 0.1
            assert source.read(read) is None
            clock[0] += 0.2


def test_a_read_that_takes_long_and_fails_is_tried_after_longer(tmp_path, clock):
    source = Changing(tmp_path)

    def read():
        clock[0] += 30
        raise InputError("locked")

    with pytest.raises(InputError):
        source.read(read)
    clock[0] += 299
    assert source.read(read) is None
    clock[0] += 2
    with pytest.raises(InputError):
        source.read(read)


def test_the_last_line_of_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "steps.jsonl")
    with pytest.raises(InputError, match=r"steps\.jsonl: expected a file"):
        read_last(tmp_path / "steps.jsonl")
    assert read_last(tmp_path / "nothing") == {}
