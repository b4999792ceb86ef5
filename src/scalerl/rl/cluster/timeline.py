"""Who did what when: the lines of timeline.jsonl, in Unix seconds by the clock of whoever did it."""

from __future__ import annotations

import time
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
    _events: list[dict[str, Any]] = field(default_factory=list)

    def generated(self, who: str, node: str, at: float, busy: float) -> None:
        """A generator has decoded for `busy` seconds since it last said something, until `at`."""
        key = who, node
        began = self._last.get(key, at - busy)
        span = self._generated.setdefault(key, _Span(began, at, 0.0))
        span.ended, span.busy = at, span.busy + busy
        self._last[key] = at

    def event(self, what: str) -> None:
        """Something happened now: somebody came, or was lost."""
        self._events.append({"event": what, "time": time.time()})

    def lines(self, step: int, began: float, seconds: float) -> list[dict[str, Any]]:
        """What was noted since the last call, and the step that was trained meanwhile."""
        spans = [
            {"role": "generate", "who": who, "node": node, "began": s.began, "ended": s.ended, "busy": s.busy}
            for (who, node), s in self._generated.items()
        ]
        train = {"role": "train", "step": step, "began": began, "ended": began + seconds, "busy": seconds}
        lines = [*self._events, *spans, train]
        self._events, self._generated = [], {}
        return lines
