"""The loop of a process that does nothing but sample, whoever it is told by.

It takes submissions, installs the newest weights between two decode steps, and decodes; threads of others
receive and send, so that decoding waits for nobody.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scalerl.rl.generator import TorchGenerator
from scalerl.rl.saved_rollouts import pack_rollouts
from scalerl.rl.types import Counters, Weights

CLOSED = object()
"""What is heard at the end."""
Say = Callable[[tuple[str, Any, Counters]], None]


def decode(
    generator: TorchGenerator,
    heard: queue.SimpleQueue[Any],
    say: Say,
    newer: Callable[[int], tuple[Weights, int] | None],
) -> None:
    """Decode what is heard, (place, prompt, draw, completions), until `CLOSED` is.

    `newer` gives the newest weights and their version where that is not the version it is told, and None is
    heard when it is to be asked. What is said is ("installed", version, counters) and
    ("complete", (places, sizes, packed rollouts), counters).
    """
    places = deque[int]()
    generator.version = -1
    while True:
        if (weights := newer(generator.version)) is not None:
            generator.update(*weights)
            say(("installed", generator.version, replace(generator.counters)))
        while not (generator.busy and heard.empty()):
            message = heard.get()
            if message is CLOSED:
                return
            if message is None:
                break  # new weights
            place, *group = message
            places.append(place)
            generator.submit(*group)
        if generator.busy:
            generator.work()
        if groups := generator.take(generator.ready):
            packed = pack_rollouts([rollout for rollouts in groups for rollout in rollouts])
            value = [places.popleft() for _ in groups], [len(rollouts) for rollouts in groups], packed
            say(("complete", value, replace(generator.counters)))
