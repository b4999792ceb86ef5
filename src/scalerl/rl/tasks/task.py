"""What a task is: where prompts come from, and how completions are judged."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import ClassVar, Protocol

from scalerl.rl.types import Limits, Prompt, Reward, Split


class Task(Protocol):
    """Prompts and their verifier: a frozen dataclass, which every process can make again from its fields.

    A class that inherits from this one has to have `prompts` and `verify`; the rest has defaults.
    """

    limits: Limits = Limits()
    """What the verification of one completion may take. With a field of this name a recipe can say it."""

    trusted: ClassVar[bool] = False
    """Whether `verify` is called in the process that generates or trains, without limits: for a pure function
    of microseconds that executes nothing of the completion. One that sleeps stops the run."""

    @abstractmethod
    def prompts(self, split: Split) -> list[Prompt]:
        """The prompts of a split: the same list, in the same order, at every call and in every process.

        No id occurs twice, and no prompt is in both splits. It is called several times: keep what takes long
        in a `functools.cached_property`, which is not sent to other processes.
        """
        ...

    @property
    def heldout_hash(self) -> str:
        """Names the held-out set: evaluations with one hash are on the same prompts."""
        lines = "\n".join(f"{p.id}\t{p.text}\t{p.answer}\t{p.messages}" for p in self.prompts("heldout"))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def prepare(self) -> None:
        """Load what `verify` needs, once, in the process that the verifying ones are forked from.

        Raises:
            InputError: it cannot be loaded; the run then does not begin.
        """

    @abstractmethod
    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Judge a completion by its `text`, without its end token; one that was truncated does not come here.

        Unless the task is `trusted`, it runs in a process of its own within `limits`, more than once for some
        completions, so that it must depend on its arguments alone; an exception costs the completion, not the
        run.
        """
        ...

    def without(self, ids: frozenset[str]) -> Task | None:
        """The same task without the prompts of these ids, which have more than `context.prompt` tokens; None
        where that is an error, as it is unless this is overridden."""
        return None
