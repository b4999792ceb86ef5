"""Who did what when: the lines of timeline.jsonl, in Unix seconds by the clock of whoever did it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Span:
    began: float
    ended: float
    busy: float


@dataclass
class Timeline:
    """Spans and events since the last `lines`."""

    _generated: dict[tuple[str, str], _Span] = field(default_factory=dict)
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _events: deque[dict[str, Any]] = field(default_factory=deque)

    def generated(self, who: str, node: str, at: float, busy: float) -> None:
        """A generator has decoded for `busy` seconds since it last said something, until `at`."""
        key = who, node
        began = self._last.get(key, at - busy)
        span = self._generated.setdefault(key, _Span(began, at, 0.0))
        span.ended, span.busy = at, span.busy + busy
        self._last[key] = at

    def event(self, kind: str, role: str, who: str, node: str, what: str, at: float | None = None) -> None:
        """Somebody has `arrived`, or is `lost`: now, or at another time; `what` is a sentence."""
        event = {"kind": kind, "role": role, "who": who, "node": node, "event": what}
        self._events.append(event | {"time": time.time() if at is None else at})

    def events(self) -> list[dict[str, Any]]:
        """Those since the last call; threads may add to them meanwhile."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def lines(self, step: int, began: float, seconds: float) -> list[dict[str, Any]]:
        """What was noted since the last call, and the step that was trained meanwhile."""
        spans = [
            {"role": "generate", "who": who, "node": node, "began": s.began, "ended": s.ended, "busy": s.busy}
            for (who, node), s in self._generated.items()
        ]
        train = {"role": "train", "step": step, "began": began, "ended": began + seconds, "busy": seconds}
        self._generated = {}
        return [*self.events(), *spans, train]
