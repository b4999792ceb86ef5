"""The decode slots of the built-in generator: the completion in each slot, and its progress.

Shapes in names: S decode slots, L positions of a slot (prompt and completion), T tokens of a completion; in
PLK, P positions whose experts are recorded, L layers, K experts of each.
"""

from typing import Any

import numpy as np

from scalerl.rl.engine.sampling import Request
from scalerl.rl.model.routing import Routers
from scalerl.rl.types import Rollout, turns_of

_SAVED = (
    *("token_SL", "logp_SL", "sampled_SL", "version_SL", "first_version_S"),
    *("key_S", "start_S", "next_S", "given_S", "asked_S"),
)
"""Arrays that a resume needs; in checkpoints their names start with an underscore."""


class DecodeSlots:
    """`n_slots` slots of `n_positions` tokens; a slot that holds a completion is active."""

    def __init__(self, n_slots: int, n_positions: int, routers: Routers | None = None) -> None:
        """Allocate the arrays; with `routers`, also one for the experts that they choose."""
        shape = n_slots, n_positions
        self.requests: dict[int, Request] = {}
        """The completions in the active slots, by slot."""
        self.active_S = np.zeros(n_slots, dtype=bool)
        self.token_SL = np.zeros(shape, dtype=np.int64)
        self.logp_SL = np.zeros(shape, dtype=np.float32)
        self.sampled_SL = np.zeros(shape, dtype=bool)
        self.version_SL = np.zeros(shape, dtype=np.int32)
        self.first_version_S = np.zeros(n_slots, dtype=np.int32)
        self.key_S = np.zeros(n_slots, dtype=np.uint64)
        self.start_S = np.zeros(n_slots, dtype=np.int64)
        """Position at which the completion starts."""
        self.next_S = np.zeros(n_slots, dtype=np.int64)
        """Position of the next token."""
        self.given_S = np.zeros(n_slots, dtype=np.int64)
        """End position of an environment's answer, whose tokens are decoded but not sampled."""
        self.asked_S = np.full(n_slots, -1, dtype=np.int64)
        """The decode step after which an environment was asked for an answer; -1 if none is pending."""
        self.expert_SPLK: np.ndarray | None = None
        """The experts that read each position, if they are recorded."""
        self._saved = _SAVED
        if routers is not None:
            self.expert_SPLK = np.zeros((*shape, *routers.shape), dtype=routers.dtype)
            self._saved = (*_SAVED, "expert_SPLK")

    def __len__(self) -> int:
        return len(self.active_S)

    @property
    def decoding_S(self) -> np.ndarray:
        """True for the slots that decode: the active ones without a pending answer."""
        return self.active_S & (self.asked_S < 0)

    def start(self, slot: int, request: Request, version: int) -> None:
        """Start a completion in a free slot, with its prompt only."""
        n = len(request.prompt_T)
        # The other arrays keep values of an earlier completion: they are read only up to `next_S`.
        self.requests[slot] = request
        self.active_S[slot] = True
        self.token_SL[slot] = 0
        self.token_SL[slot, :n] = request.prompt_T
        self.key_S[slot] = request.key
        self.start_S[slot] = self.next_S[slot] = n
        self.given_S[slot], self.asked_S[slot] = 0, -1
        self.first_version_S[slot] = version

    def free(self, slot: int) -> Request:
        """Free a slot; return its request."""
        self.active_S[slot] = False
        return self.requests.pop(slot)

    def turns(self, slot: int) -> list[np.ndarray]:
        """Return the tokens of each turn of the model so far."""
        span = slice(self.start_S[slot], self.next_S[slot])
        return turns_of(self.token_SL[slot, span], self.sampled_SL[slot, span])

    def rollout(self, slot: int, truncated: bool) -> Rollout:
        """Return the completion in a slot; its arrays are copies, because the slot is refilled at once."""
        span = slice(int(self.start_S[slot]), int(self.next_S[slot]))
        experts = self.expert_SPLK
        return self.requests[slot].rollout(
            token_T=self.token_SL[slot, span].copy(),
            sampled_T=self.sampled_SL[slot, span].copy(),
            logp_T=self.logp_SL[slot, span].copy(),
            version_T=self.version_SL[slot, span].copy(),
            first_version=int(self.first_version_S[slot]),
            truncated=truncated,
            expert_PLK=None if experts is None else experts[slot, : span.stop - 1].copy(),
        )

    def state(self, slots: np.ndarray) -> dict[str, Any]:
        """Return what `restore` needs of some slots, except their requests."""
        return {f"_{name}": getattr(self, name)[slots] for name in self._saved}

    def restore(self, slots: np.ndarray, requests: list[Request], state: dict[str, Any]) -> None:
        """Restore `slots` from their `state` and `requests`."""
        self.requests |= dict(zip(slots.tolist(), requests, strict=True))
        self.active_S[slots] = True
        for name, values in state.items():  # older checkpoints have fewer
            getattr(self, name.removeprefix("_"))[slots] = values
