"""The protocol of a task: where prompts come from, and how completions are verified."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from scalerl.errors import InputError, brief, in_one_line
from scalerl.rl.types import Limits, Prompt, Reward, Split, as_reward

SLOT = "{prompt}"
"""What a template replaces by the problem."""


def check_presentation(template: str | None, system: str | None, chat_template: bool) -> None:
    """Raise a ValueError where a template has no place for the problem, or a system prompt no chat."""
    if template is not None and SLOT not in template:
        raise ValueError(f"template must hold {SLOT}")
    if system is not None and not chat_template:
        raise ValueError("system needs chat_template = true")


class Task(Protocol):
    """Prompts and their verifier: a frozen dataclass, which every process can rebuild from its fields.

    A subclass must have `prompts` and `verify`; the rest has defaults.
    """

    limits: Limits = Limits()
    """Limits of time and memory of one verification. A field of this name lets a recipe set them."""

    weights: Mapping[str, float] = MappingProxyType({})
    """How often tasks of a mixture are drawn, by the start of their prompts' ids; of one task, nothing."""

    turns: int = 1
    """Turns that a completion has, at most: with more than one, `respond` answers those before the last."""

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
        lines = "\n".join(
            # Only where there are some: the hashes of runs before there were any hold on.
            f"{p.id}\t{p.text}\t{p.answer}\t{p.messages}{p.template_args or ''}"
            for p in prompts_of(self, "heldout")
        )
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def prepare(self) -> None:
        """Load what `verify` needs, once, in the process from which verifier workers are forked.

        Raises:
            InputError: it cannot be loaded; the run then does not start.
        """

    @abstractmethod
    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify a completion by its `text`, without its end token; truncated ones are not verified.

        A bool stands for a reward of +1 or -1.

        This runs in a verifier worker within `limits`, more than once for some completions, so it must depend
        on its arguments alone. An exception loses the completion, not the run.
        """
        ...

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Answer the last of the model's `turns`, which are texts without their end tokens.

        Where the prompt is one of messages, each answer is a message of the role `tool`, or `user` where it
        is a `scalerl.rl.types.UserText`; else it is text that is appended. Without an answer, the default,
        the completion has ended.

        This runs in a worker within `limits`, and begins anew every time, so it must depend on its arguments
        alone. An exception ends the completion, which then counts as truncated.
        """
        return ()

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward | bool:
        """Verify a completion of several turns: by its last one, where this is not overridden."""
        return self.verify(prompt, turns[-1])

    def reference(self, prompt: Prompt) -> str | None:
        """Return an answer that `verify` must accept, for `scalerl audit`; None where none is known."""
        return prompt.answer or None

    def without(self, ids: frozenset[str]) -> Task | None:
        """Return the task without the prompts of these ids, which are longer than `context.prompt`.

        None, the default, makes such prompts an error.
        """
        return None


def verdict(task: Task, prompt: Prompt, turns: Sequence[str]) -> Reward:
    """Return the reward of a completion by the texts of its turns, of which it has one or several."""
    return as_reward(task.verify(prompt, turns[0]) if len(turns) == 1 else task.verify_turns(prompt, turns))


def prompts_of(task: Task, split: Split) -> list[Prompt]:
    """Return the prompts of a split; raise an InputError where the task raises anything."""
    with in_one_line(f"task {type(task).__name__}: prompts({split!r}) raised an error"):
        return task.prompts(split)


def split_off(prompts: list[Prompt], heldout: int, name: str) -> dict[Split, list[Prompt]]:
    """Return the first `heldout` prompts of a source of this name, and the others to train on.

    Raises:
        InputError: there are no others.
    """
    if len(prompts) <= heldout:
        raise InputError(
            f"task.heldout: {name} has {len(prompts)} different prompts, and {heldout} are held out"
        )
    return {"heldout": prompts[:heldout], "train": prompts[heldout:]}


def check_task(task: Task) -> None:
    """Raise an InputError where the prompts of a task are not what `Task.prompts` promises."""
    heldout = {prompt.asked for prompt in checked_prompts(task, "heldout")}
    train = checked_prompts(task, "train")
    if both := [prompt for prompt in train if prompt.asked in heldout]:
        many = f"{len(both)} of {len(train)} training prompts are held out, too"
        raise InputError(f"task: prompt {brief(both[0].id)} is in both splits ({many}): leave it out of one")


def checked_prompts(task: Task, split: Split, place: str = "task") -> list[Prompt]:
    """Return the prompts of a split; raise an InputError, which begins with `place`, where they are not what
    `Task.prompts` promises.
    """
    prompts, name = prompts_of(task, split), {"heldout": "held-out", "train": "training"}[split]
    if not isinstance(prompts, list | tuple):  # a generator could be read once only
        raise InputError(f"{place}: prompts({split!r}) returns {brief(prompts)}: expected a list of Prompt")
    if not prompts:
        raise InputError(f"{place}: prompts({split!r}) is empty: there is no {name} prompt")
    if odd := [prompt for prompt in prompts if not isinstance(prompt, Prompt)]:
        raise InputError(f"{place}: prompts({split!r}) holds {brief(odd[0])}: expected a Prompt")
    if twice := [id for id, n in Counter(prompt.id for prompt in prompts).items() if n > 1]:
        raise InputError(f"{place}: {name} prompts share the id {brief(twice[0])}: each must have its own")
    return prompts
