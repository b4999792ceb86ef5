"""Whether the cluster of a run is still there: its head, and the part of Ray on the driver's node.

Ray ends a driver whose node's part has died at its next use, without a word, and one whose head is gone a
minute later. So both are looked at by a thread, and the driver asks (`check`) before it uses Ray: the run
then ends with a line and a status. Where it cannot ask in time, as it waits within Ray, the thread ends it;
and where Ray was faster, a process that waits for the end of this one has the line (`LastWords`).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from scalerl.errors import WorkerError, first_line

_LOG = logging.getLogger("scalerl")
_LOOK, _ANSWER = 1.0, 5.0  # seconds between two looks, and until an answer
GRACE = 30.0
"""Seconds in which a run has to end once its cluster is lost; then it is ended."""
_RESUME = "the run folder is whole up to its newest checkpoint, and --resume goes on, on a new cluster"
_watched: ClusterWatch | None = None
_words: LastWords | None = None


class ClusterLostError(WorkerError):
    """The head of the cluster is gone, or the driver's node of it: nothing can be asked of anybody."""


def check() -> None:
    """Before Ray is used by the driver; in other processes of a run it says nothing.

    Raises:
        ClusterLostError: the cluster is lost.
    """
    if _watched is not None and _watched.lost:
        raise ClusterLostError(_watched.lost)


def gone() -> bool:
    """Whether it is lost, or its head does not answer just now: what is asked of it is then waited for."""
    return _watched is not None and bool(_watched.lost or _watched.look(0.0))


@contextmanager
def watched(head: str, own: str, heartbeat: float) -> Iterator[None]:
    """Look after the head at HOST:PORT, and after Ray's process on this node, which listens at a path `own`.

    The head may be away for `heartbeat` seconds.

    Raises:
        ClusterLostError: in place of whatever came of the loss.
    """
    global _watched
    _watched = watch = ClusterWatch(head, own, heartbeat)
    try:
        yield
    except ClusterLostError:
        raise
    except Exception as error:
        if why := watch.lost or watch.look(0.0):
            watch.lost = why
            raise ClusterLostError(why) from error
        raise
    finally:
        watch.close()
        _watched = None


class LastWords:
    """A line on standard error once this process has ended without `keep`, by Ray or by a kill: it is said
    by a process that waits for that."""

    def __init__(self, line: str) -> None:
        script = 'read -r end || printf "%s\\n" "$0" >&2'
        command = ["/bin/sh", "-c", script, line]
        self._other = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def keep(self) -> None:
        """This process ends by itself."""
        with suppress(OSError):
            self._other.communicate(b"end\n")


@contextmanager
def last_words() -> Iterator[None]:
    """Whoever ends this process meanwhile, it is told that and how the run can go on."""
    global _words
    _words = LastWords(f"scalerl: [cluster]: this process was ended by Ray, or from outside; {_RESUME}")
    try:
        yield
    finally:
        _words.keep()
        _words = None


class ClusterWatch:
    """A thread that looks whether head and node answer; `lost` says what does not, and what to do."""

    def __init__(
        self, head: str, own: str, heartbeat: float, end: Callable[[str], None] | None = None
    ) -> None:
        """`end` is called where the run has not ended by itself in time."""
        self._head, self._own, self.heartbeat = head, own, heartbeat
        self._end = end or _end
        self._answered = time.monotonic()
        self._told = False
        self._closed = threading.Event()
        self.lost = ""
        threading.Thread(target=self._watch, name="cluster-watch", daemon=True).start()

    def close(self) -> None:
        """The run has ended by itself."""
        self._closed.set()

    def look(self, heartbeat: float, held: bool = False) -> str:
        """What is lost, if anything: the head, where it has not answered for so many seconds.

        Ray on this node is there if a connection to it is `held`; to ask it anew is a line in its log.
        """
        head = f"its head at {self._head}"
        complaint = _complaint(self._head)
        if not complaint:
            self._answered, self._told = time.monotonic(), False
        away = time.monotonic() - self._answered
        if complaint and away >= heartbeat:
            return f"[cluster]: {head} is gone: no answer for {away:.0f} s ({complaint}); {_RESUME}"
        if not held and _has_ended(self._own):
            also = f", and {head} does not answer" if complaint else ""
            return f"[cluster]: Ray has ended on this node{also}; {_RESUME}"
        if complaint and not self._told:
            self._told = True
            limit = f"{heartbeat:g} s (cluster.timeouts.heartbeat)"
            _LOG.warning(
                "[cluster]: %s does not answer (%s); the run waits for it %s", head, complaint, limit
            )
        return ""

    def _watch(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER)
            held = connection.connect_ex(self._own) == 0
            while not (self.lost or self._closed.is_set()):
                if not held:
                    self._closed.wait(_LOOK)
                elif select.select([connection], [], [], _LOOK)[0]:  # it has ended, which is seen at once
                    held = False
                self.lost = self.look(self.heartbeat, held)
        if self.lost and not self._closed.wait(GRACE):
            self._end(self.lost)


def _complaint(address: str) -> str:
    """Why nobody can be reached at HOST:PORT; empty where somebody can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except OSError as error:
        return first_line(error)
    return ""


def _has_ended(path: str) -> bool:
    """Whether nobody listens at a path any more; one that is slow to answer does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            pass
    return False


def _end(why: str) -> None:
    """End this process, as Ray would; its own processes follow it."""
    if _words is not None:
        _words.keep()
    os.write(2, f"scalerl: {why}\n".encode())
    os._exit(1)
