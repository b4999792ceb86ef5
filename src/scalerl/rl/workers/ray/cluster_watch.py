"""A watch on the cluster of a run: its head, and Ray's process (raylet) on the driver's node.

Ray ends a driver without a message: at its next call if the node's raylet has died, and a minute later if the
head is gone. So a thread watches both, and the driver calls `check` before it uses Ray, so that the run ends
with a message and an exit status. If the driver cannot check in time, because it waits within Ray, the thread
ends it. If Ray was faster, a process that waits for the end of this one prints a message (`last_words`).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from scalerl.errors import WorkerError, first_line

_LOG = logging.getLogger("scalerl")
_INTERVAL, _ANSWER = 1.0, 5.0  # seconds between two checks, and the timeout of an answer
GRACE = 30.0
"""Seconds that a run has to end by itself once its cluster is lost."""
_RESUME = "the run folder is whole up to its newest checkpoint, and --resume goes on, on a new cluster"
_watched: ClusterWatch | None = None
_words: subprocess.Popen[bytes] | None = None


class ClusterLostError(WorkerError):
    """The cluster's head is gone, or Ray on the driver's node: no actor can be reached."""


def check() -> None:
    """Check the watched cluster before the driver uses Ray; does nothing in other processes.

    Raises:
        ClusterLostError: the cluster is lost.
    """
    if _watched is not None and _watched.lost:
        raise ClusterLostError(_watched.lost)


def gone() -> bool:
    """Return whether the cluster is lost or does not answer now, so that a call to Ray could block."""
    return _watched is not None and bool(_watched.lost or _watched.look(0.0))


@contextmanager
def watched(head: str, own: str, heartbeat: float) -> Iterator[None]:
    """Watch the head at HOST:PORT, and the raylet on this node, which listens at the path `own`.

    The head may be unreachable for `heartbeat` seconds.

    Raises:
        ClusterLostError: in place of any error that the loss has caused.
    """
    global _watched
    _watched = watch = ClusterWatch(head, own, heartbeat)
    try:
        yield
    except ClusterLostError:
        raise
    except Exception as error:
        # Calls to Ray fail in many ways once it is gone, mostly before the thread has noticed the loss.
        if why := watch.lost or watch.look(0.0):
            watch.lost = why
            raise ClusterLostError(why) from error
        raise
    finally:
        watch.close()
        _watched = None


@contextmanager
def last_words() -> Iterator[None]:
    """Print how to resume the run if Ray or a kill ends this process within the context."""
    global _words
    line = f"scalerl: [cluster]: this process was ended by Ray, or from outside; {_RESUME}"
    script = 'read -r end || printf "%s\\n" "$0" >&2'
    # A shell, because after an _exit by Ray or a SIGKILL only another process can print. It reads until the
    # pipe closes, which the kernel does for a killed writer.
    command = ["/bin/sh", "-c", script, line]
    _words = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        _keep_words()


def _keep_words() -> None:
    """Stop the shell without printing: this process ends by itself."""
    global _words
    if _words is not None:
        with suppress(OSError):
            _words.communicate(b"end\n")
    _words = None


class ClusterWatch:
    """A thread that watches head and raylet; `lost` is the message once one of them is lost, or empty."""

    def __init__(self, head: str, own: str, heartbeat: float) -> None:
        self._head, self._own, self._heartbeat = head, own, heartbeat
        self._answered, self._warned = time.monotonic(), False
        self._closed = threading.Event()
        self.lost = ""
        threading.Thread(target=self._watch, name="cluster-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching: the run ends by itself."""
        self._closed.set()

    def look(self, heartbeat: float, held: bool = False) -> str:
        """Return the message of a loss, or "": the head is lost if unreachable for `heartbeat` seconds.

        The raylet is alive while a connection to it is `held`; a new one for each check would fill its log.
        """
        head = f"its head at {self._head}"
        complaint = _unreachable(self._head)
        if not complaint:
            self._answered, self._warned = time.monotonic(), False
        away = time.monotonic() - self._answered
        if complaint and away >= heartbeat:
            return f"[cluster]: {head} is gone: no answer for {away:.0f} s ({complaint}); {_RESUME}"
        if not held and _has_ended(self._own):
            also = f", and {head} does not answer" if complaint else ""
            return f"[cluster]: Ray has ended on this node{also}; {_RESUME}"
        if complaint and not self._warned:
            self._warned = True
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
                    self._closed.wait(_INTERVAL)
                elif select.select([connection], [], [], _INTERVAL)[0]:  # closed when the raylet ends
                    held = False
                self.lost = self.look(self._heartbeat, held)
        if self.lost and not self._closed.wait(GRACE):
            _end(self.lost)


def _unreachable(address: str) -> str:
    """Return why no connection to HOST:PORT can be made, or "" if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except OSError as error:
        return first_line(error)
    return ""


def _has_ended(path: str) -> bool:
    """Return whether no process listens at a path any more; a slow one counts as listening."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # a full backlog or a timeout: the process is alive
            pass
    return False


def _end(why: str) -> None:
    """End this process, as Ray would; its child processes end with it."""
    _keep_words()
    os.write(2, f"scalerl: {why}\n".encode())
    os._exit(1)
