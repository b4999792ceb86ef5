"""Handles of actors for tests of what Ray's are asked, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class ActorHandle:
    """An actor, of which every call comes to what `future` makes."""

    def __init__(self, future: Callable[[], Future[Any]]) -> None:
        self.future = future

    def __getattr__(self, name: str) -> ActorHandle:
        return self

    def remote(self, *arguments: Any) -> ActorHandle:
        """Call a method."""
        return self
