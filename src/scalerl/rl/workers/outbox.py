"""Messages to a process, sent by a thread: one that does not read holds up nobody."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Outbox:
    """Sends messages over `channel`, in order. A pipe takes 64 KiB, and a process that is stopped, or hangs,
    takes nothing more: the sender would wait for it for ever."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def put(self, message: Any) -> None:
        """Send `message`; to a process that has exited it is dropped."""
        self._messages.put(ForkingPickler.dumps(message))  # here, where an error has a caller

    def close(self) -> None:
        """Close the channel once all is sent, or the process has exited."""
        self._messages.put(None)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._channel.send_bytes(message)
            self._channel.close()
            return
        # The reader may be waiting for this channel: it is closed when that is done.
        while self._messages.get() is not None:
            pass
        self._channel.close()
