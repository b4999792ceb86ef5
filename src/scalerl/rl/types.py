"""The types that flow along the arrows of the training loop, one per arrow.

    PromptPool -Prompt-> Generator -Rollout-> Task.verify -Group-> advantage -Batch-> Learner

Shapes in names: T tokens of a completion, G completions of a group, N completions of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_Result = TypeVar("_Result", covariant=True)
Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """PyTorch's name, such as `bfloat16`."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Plan = tuple[TensorSpec, ...]
"""The parameters in a stream of weights, equal for all versions; transports allocate buffers by it."""


class Weights(Protocol):
    """A model's parameters as a stream of named tensors, in their own dtype and device; tied ones once.

    A learner's must be read before its next step; `scalerl.rl.sync.shared_weights.hold` copies them.
    """

    @property
    def plan(self) -> Plan:
        """Names, shapes and dtypes, in any order."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, which must not be written to."""
        ...


@dataclass(frozen=True)
class Prompt:
    """A problem: `text` for the model, `answer` for the verifier. `id` is `task/stratum/number`."""

    id: str
    text: str
    answer: str
    messages: tuple[tuple[str, str], ...] | None = None
    """The conversation (role, content) that the tokenizer's chat template turns into tokens; None tokenizes
    `text` as it is."""
    template_args: tuple[tuple[str, str | int | float], ...] = ()
    """Arguments of the chat template by name, such as ("enable_thinking", False)."""

    @property
    def asked(self) -> tuple[str, str]:
        """The prompt as the model sees it: two prompts for which this is equal are the same problem."""
        return self.text, str(self.messages)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a prompt from the JSON of its `dataclasses.asdict`."""
        messages, arguments = values["messages"], values.get("template_args", ())  # which the first runs lack
        messages = None if messages is None else tuple(map(tuple, messages))
        return cls(**{**values, "messages": messages, "template_args": tuple(map(tuple, arguments))})


@dataclass(frozen=True)
class Rollout:
    """One sampled completion, with everything that the trainer cannot recompute afterwards."""

    prompt: Prompt
    epoch: int
    """How many times the prompt had been drawn before."""
    sample: int
    """Index of this completion within its group."""
    prompt_T: np.ndarray
    """Prompt tokens."""
    token_T: np.ndarray
    """Completion tokens, including inserted ones."""
    sampled_T: np.ndarray
    """True where the model sampled the token, False where an interruption inserted it or an environment
    answered."""
    logp_T: np.ndarray
    """Log-probability at sampling, at the sampling temperature; 0 where the token was not sampled."""
    version_T: np.ndarray
    """Version of the weights that made the logits of each token."""
    first_version: int
    """Version of the weights that filled the first entries of the KV cache (those of the prompt)."""
    truncated: bool
    """Whether it ran out of budget before the end token, or its environment failed."""
    interrupted: bool
    """Whether an inserted phrase ended its thinking."""
    expert_PLK: np.ndarray | None = None
    """With `routing_replay`, the experts chosen for each token of prompt and completion except the last: P
    tokens, L layers with experts, K experts per token."""

    @cached_property
    def length(self) -> int:
        """Number of sampled tokens; inserted ones do not count."""
        return int(np.count_nonzero(self.sampled_T))

    @property
    def turns(self) -> list[np.ndarray]:
        """The tokens of each turn of the model; an interrupted completion is one turn."""
        return [self.token_T] if self.interrupted else turns_of(self.token_T, self.sampled_T)


def turns_of(token_T: np.ndarray, sampled_T: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of each turn of the model: those sampled between two answers of an environment."""
    if sampled_T.all():  # most completions have one turn, and finding edges takes 20 us
        return [token_T]
    edges = np.flatnonzero(np.diff(sampled_T)) + 1
    return np.split(token_T, edges)[::2]  # the first token is always the model's


class UserText(str):
    """The response to a turn where it comes from a user instead of a tool: see `Task.respond`."""


@dataclass(frozen=True)
class Reward:
    """The verdict on a completion: the number to train on, and whether the answer is right."""

    value: float
    correct: bool
    failed: str | None = None
    """Why the verification itself failed, if it did; the completion is then left out of the loss."""


def as_reward(verdict: Reward | bool) -> Reward:
    """Convert a verifier's verdict to a reward: a bool stands for +1 or -1."""
    return Reward(1.0 if verdict else -1.0, verdict) if isinstance(verdict, bool) else verdict


FAILED = Reward(-1.0, False)
"""The reward of a truncated completion, and of one whose verification failed."""


@dataclass(frozen=True)
class Limits:
    """Limits for the verification of one completion, which runs in processes of its own."""

    seconds: float = 10.0
    memory_gib: float = 4.0
    """Address space of each process, and memory of all processes that one verification starts (Linux)."""
    workers: int = 2
    """Workers that verify in parallel; the rewards do not depend on their number."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 1e6 or not 0 < self.memory_gib < math.inf:
            raise ValueError("seconds must be positive and 1e6 at most, memory_gib positive and finite")
        if self.workers < 1:
            raise ValueError("workers must be at least 1")


@dataclass(frozen=True)
class Group:
    """The completions of one prompt in one epoch, verified."""

    rollouts: tuple[Rollout, ...]
    reward_G: np.ndarray
    correct_G: np.ndarray
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why verifications failed, by the index of the completion in the group."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> Self:
        """Make the group of `rollouts` with their rewards."""
        return cls(
            tuple(rollouts),
            np.array([reward.value for reward in rewards], dtype=float),
            np.array([reward.correct for reward in rewards]),
            {i: reward.failed for i, reward in enumerate(rewards) if reward.failed},
        )

    @property
    def prompt(self) -> Prompt:
        """The prompt that all completions share."""
        return self.rollouts[0].prompt


class Pending(Protocol[_Result]):
    """Work in progress, perhaps in another process; both methods re-raise the work's errors."""

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the work; return whether it is done."""
        ...

    def result(self) -> _Result:
        """Return the result of finished work."""
        ...


@dataclass(frozen=True)
class Done(Generic[_T]):
    """Work that is finished from the start."""

    value: _T

    def wait(self, seconds: float) -> bool:
        """Return true at once: the work is finished."""
        return True

    def result(self) -> _T:
        """Return the result."""
        return self.value


@dataclass(frozen=True)
class Mapped(Generic[_T]):
    """Work whose result is a function of another work's result, computed when it is read."""

    function: Callable[[Any], _T]
    work: Pending[Any]

    def wait(self, seconds: float) -> bool:
        """Wait for the other work."""
        return self.work.wait(seconds)

    def result(self) -> _T:
        """Apply the function to the other work's result."""
        return self.function(self.work.result())


Verify = Callable[[Sequence[Sequence[Rollout]]], Pending[list[list[Reward]]]]
"""Start the verification of some groups, which gives a reward for every completion."""


@dataclass
class Counters:
    """Counters of a generator."""

    tokens: int = 0
    """Tokens sampled."""
    flops: float = 0.0
    ticks: int = 0
    """Decode steps."""
    seconds: float = 0.0
    """Seconds of decoding and weight updates, summed over processes; the first weights count as start-up."""
    held: float = 0.0
    """Seconds for which processes that only sample were held: from the first work of each until `seconds` was
    read."""
    startup: float = 0.0
    """Seconds of these processes before their first work."""
    restarted: int = 0
    """Groups whose completions were restarted because a process was lost or the run was resumed."""
