"""Writing to disk beside the training, one thing at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from scalerl.errors import WriteError

_LOG = logging.getLogger("scalerl")


class BackgroundWriter:
    """Writes in a thread; what is written next waits for what is under way."""

    def __init__(self, what: str) -> None:
        """`what` is written, as warnings name it: `this checkpoint`."""
        self._what = what
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in the thread, once what is under way is on the disk."""
        self.wait()
        self._under_way = self._thread.submit(write)

    def fail(self, error: WriteError) -> None:
        """Keep why nothing can be written: `wait` warns of it, `finish` raises it."""
        self._under_way = Future()
        self._under_way.set_exception(error)

    def wait(self) -> None:
        """Wait until what is under way is on the disk; a disk that does not take it is a warning."""
        try:
            self.finish()
        except WriteError as error:
            _LOG.warning("%s; training goes on without %s", error, self._what)

    def finish(self) -> None:
        """Wait until what is under way is on the disk.

        Raises:
            WriteError: it could not be written.
        """
        if self._under_way is not None:
            future, self._under_way = self._under_way, None
            future.result()

    def close(self) -> None:
        """Wait, and stop the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
