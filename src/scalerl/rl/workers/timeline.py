"""The record of what each actor did when: timeline.jsonl, in Unix seconds by the clock of its node."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timeline:
    """Spans and events since the last `lines`."""

    _spans: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _events: deque[dict[str, Any]] = field(default_factory=deque)

    def generated(self, who: str, node: str, at: float, busy: float) -> None:
        """Record that a generator has decoded for `busy` seconds since its last report, until `at`."""
        # By node too: an actor that has moved starts another span, by another clock.
        key = who, node
        new = {"role": "generate", "who": who, "node": node, "began": self._last.get(key, at - busy)}
        span = self._spans.setdefault(key, new | {"ended": at, "busy": 0.0})
        span["ended"], span["busy"] = at, span["busy"] + busy
        self._last[key] = at

    def event(self, kind: str, role: str, who: str, node: str, what: str, at: float | None = None) -> None:
        """Record that an actor has `arrived` or is `lost`, `at` a time or now; `what` is a sentence."""
        event = {"kind": kind, "role": role, "who": who, "node": node, "event": what}
        self._events.append(event | {"time": time.time() if at is None else at})

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call; other threads may add events meanwhile."""
        # A fixed number: iterating over a deque that a thread appends to raises RuntimeError.
        return [self._events.popleft() for _ in range(len(self._events))]

    def lines(self, step: int, began: float, seconds: float) -> list[dict[str, Any]]:
        """Return the events and spans since the last call, and the span of the step trained meanwhile."""
        spans, self._spans = list(self._spans.values()), {}
        train = {"role": "train", "step": step, "began": began, "ended": began + seconds, "busy": seconds}
        return [*self.events(), *spans, train]
