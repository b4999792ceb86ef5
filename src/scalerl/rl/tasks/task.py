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
"""The part of a template that the problem replaces."""


def check_presentation(template: str | None, system: str | None, chat_template: bool) -> None:
    """Raise a ValueError if a template has no slot for the problem, or a system prompt no chat template."""
    if template is not None and SLOT not in template:
        raise ValueError(f"template must hold {SLOT}")
    if system is not None and not chat_template:
        raise ValueError("system needs chat_template = true")


class Task(Protocol):
    """Prompts and their verifier: a frozen dataclass, which every process can rebuild from its fields.

    A subclass must have `prompts` and `verify`; all else has defaults.
    """

    limits: Limits = Limits()
    """Time and memory limits of one verification. A field of this name lets a recipe set them."""

    weights: Mapping[str, float] = MappingProxyType({})
    """How often each task of a mixture is drawn, by the start of its prompts' ids; empty if not a mixture."""

    turns: int = 1
    """Maximum number of turns of a completion; if above one, `respond` answers all turns but the last."""

    @abstractmethod
    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split: the same list, in the same order, at every call in every process.

        No id occurs twice, and no prompt is in both splits. It is called several times: cache slow parts in
        a `functools.cached_property`, which is not sent to other processes.
        """
        ...

    @property
    def heldout_hash(self) -> str:
        """A hash of the held-out set: evaluations with equal hashes have the same prompts."""
        lines = "\n".join(
            # Arguments only if there are any, so that the hashes of runs from before they existed stay valid.
            f"{p.id}\t{p.text}\t{p.answer}\t{p.messages}{p.template_args or ''}"
            for p in prompts_of(self, "heldout")
        )
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    def prepare(self) -> None:
        """Load what `verify` needs, once, in the process from which verifier workers are forked.

        Raises:
            InputError: something cannot be loaded; the run then does not start.
        """

    @abstractmethod
    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify a completion by its `text`, without its end token; truncated ones are not verified.

        A bool stands for a reward of +1 or -1.

        This runs in a verifier worker within `limits`, more than once for some completions, so it must depend
        only on its arguments. An exception loses the completion, not the run.
        """
        ...

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Answer the last of the model's `turns`, which are texts without their end tokens.

        If the prompt consists of messages, each answer is a message of role `tool`, or of role `user` if it
        is a `scalerl.rl.types.UserText`; otherwise it is text that is appended. No answer, the default, ends
        the completion.

        This runs in a worker within `limits` and starts afresh at every call, so it must depend only on its
        arguments. An exception ends the completion, which then counts as truncated.
        """
        return ()

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward | bool:
        """Verify a completion of several turns; by default, verify its last turn."""
        return self.verify(prompt, turns[-1])

    def reference(self, prompt: Prompt) -> str | None:
        """Return an answer that `verify` must accept, for `scalerl audit`; None if none is known."""
        return prompt.answer or None

    def without(self, ids: frozenset[str]) -> Task | None:
        """Return the task without the prompts of these ids, which are longer than `context.prompt`.

        None, the default, makes such prompts an error.
        """
        return None


def verdict(task: Task, prompt: Prompt, turns: Sequence[str]) -> Reward:
    """Return the reward of a completion from the texts of its turns, one or several."""
    return as_reward(task.verify(prompt, turns[0]) if len(turns) == 1 else task.verify_turns(prompt, turns))


def prompts_of(task: Task, split: Split) -> list[Prompt]:
    """Return the prompts of a split; any error of the task becomes an InputError."""
    with in_one_line(f"task {type(task).__name__}: prompts({split!r}) raised an error"):
        return task.prompts(split)


def split_off(prompts: list[Prompt], heldout: int, name: str) -> dict[Split, list[Prompt]]:
    """Split the prompts of the source `name`: hold out the first `heldout`, and train on the others.

    Raises:
        InputError: there are no others.
    """
    if len(prompts) <= heldout:
        raise InputError(
            f"task.heldout: {name} has {len(prompts)} different prompts, and {heldout} are held out"
        )
    return {"heldout": prompts[:heldout], "train": prompts[heldout:]}


def check_task(task: Task) -> None:
    """Raise an InputError if the prompts of a task are not as `Task.prompts` requires."""
    heldout = {prompt.asked for prompt in checked_prompts(task, "heldout")}
    train = checked_prompts(task, "train")
    if both := [prompt for prompt in train if prompt.asked in heldout]:
        many = f"{len(both)} of {len(train)} training prompts are held out, too"
        raise InputError(f"task: prompt {brief(both[0].id)} is in both splits ({many}): leave it out of one")


def checked_prompts(task: Task, split: Split, place: str = "task") -> list[Prompt]:
    """Return the prompts of a split; raise an InputError that starts with `place` if they are not as
    `Task.prompts` requires.
    """
    prompts, name = prompts_of(task, split), {"heldout": "held-out", "train": "training"}[split]
    if not isinstance(prompts, list | tuple):  # a generator could be read only once
        raise InputError(f"{place}: prompts({split!r}) returns {brief(prompts)}: expected a list of Prompt")
    if not prompts:
        raise InputError(f"{place}: prompts({split!r}) is empty: there is no {name} prompt")
    if odd := [prompt for prompt in prompts if not isinstance(prompt, Prompt)]:
        raise InputError(f"{place}: prompts({split!r}) holds {brief(odd[0])}: expected a Prompt")
    if twice := [id for id, n in Counter(prompt.id for prompt in prompts).items() if n > 1]:
        raise InputError(f"{place}: {name} prompts share the id {brief(twice[0])}: each must have its own")
    return prompts
