"""The protocol of a task: where prompts come from, and how completions are verified."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import ClassVar, Protocol

from scalerl.rl.types import Limits, Prompt, Reward, Split


class Task(Protocol):
    """Prompts and their verifier: a frozen dataclass, which every process can rebuild from its fields.

    A subclass must have `prompts` and `verify`; the rest has defaults.
    """

    limits: Limits = Limits()
    """Limits of time and memory of one verification. A field of this name lets a recipe set them."""

    trusted: ClassVar[bool] = False
    """Whether `verify` is called in the process that generates or trains, without limits: for a pure function
    of microseconds that executes nothing of the completion. One that blocks stops the run."""

    @abstractmethod
    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split: the same list, in the same order, at every call in every process.

        No id occurs twice, and no prompt is in both splits. It is called several times: cache slow parts in
        a `functools.cached_property`, which is not sent to other processes.
        """
        ...

    @property
    def heldout_hash(self) -> str:
        """A hash of the held-out set: evaluations with equal hashes are on the same prompts."""
        lines = "\n".join(f"{p.id}\t{p.text}\t{p.answer}\t{p.messages}" for p in self.prompts("heldout"))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def prepare(self) -> None:
        """Load what `verify` needs, once, in the process from which verifier workers are forked.

        Raises:
            InputError: it cannot be loaded; the run then does not start.
        """

    @abstractmethod
    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Verify a completion by its `text`, without its end token; truncated ones are not verified.

        Unless the task is `trusted`, this runs in a verifier worker within `limits`, more than once for some
        completions, so it must depend on its arguments alone. An exception loses the completion, not the run.
        """
        ...

    def without(self, ids: frozenset[str]) -> Task | None:
        """Return the task without the prompts of these ids, which are longer than `context.prompt`.

        None, the default, makes such prompts an error.
        """
        return None
