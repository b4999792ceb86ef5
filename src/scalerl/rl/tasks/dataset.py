"""`dataset`: prompts and answers from a file, a folder or the Hugging Face Hub, and a verifier of choice.

    rows -> prompts (system, template) -> without repetitions -> held out | train -> limit

What is held out, and what a limit leaves, depends on the seed and the texts alone: not on the order of the
rows, and hardly on rows that are added later.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from scalerl.errors import InputError, brief
from scalerl.kinds import Choice
from scalerl.rl.tasks.rows import DatasetRow, read_rows
from scalerl.rl.tasks.task import Task
from scalerl.rl.tasks.verifiers import AnyVerifier, Math, Verifier
from scalerl.rl.types import Limits, Prompt, Reward, Split

_SLOT = "{prompt}"


@dataclass(frozen=True)
class _Contents:
    """The prompts of the two splits, and how many rows were left out, by reason."""

    prompts: dict[Split, list[Prompt]]
    dropped: Counter[str]


@dataclass(frozen=True)
class Dataset(Task):
    """Prompts and answers of a data set; `docs/tasks.md` explains every field."""

    path: str
    """A .jsonl or .parquet file, a folder, or a name on the Hugging Face Hub."""
    kind: Literal["dataset"] = "dataset"
    subset: str | None = None
    split: str = "train"
    """Of a folder or a data set of the Hub."""
    heldout_path: str | None = None
    heldout_split: str | None = None
    """Where the held-out prompts are; with neither, they are drawn from the others."""
    heldout: int = 1000
    """Prompts to hold out: exactly as many if drawn from the others, at most as many of their own data."""
    limit: int | None = None
    """Training prompts at most."""
    seed: int = 0
    """Draws what is held out, and what `limit` leaves."""
    prompt: str = "prompt"
    """Column of a text or of chat messages; `a.b` is field b of column a."""
    answer: str = "answer"
    id: str | None = None
    system: str | None = None
    """A system prompt, in place of that of the data."""
    template: str | None = None
    """Text around the prompt, which takes the place of `{prompt}`; of messages, around the last."""
    chat_template: bool = True
    """Whether prompts go through the chat template of the tokenizer, or are its text as they are."""
    too_long: Literal["error", "drop"] = "error"
    """What prompts longer than `context.prompt` are."""
    verifier: Annotated[Verifier, Choice("verifiers", Verifier, AnyVerifier)] = field(default_factory=Math)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.heldout < 1 or self.seed < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError("heldout and limit must be at least 1, and seed not negative")
        if self.template is not None and _SLOT not in self.template:
            raise ValueError(f"template must hold {_SLOT}")
        if self.system is not None and not self.chat_template:
            raise ValueError("system needs chat_template = true")

    def prompts(self, split: Split) -> list[Prompt]:
        """The prompts of a split, in the order of the rows.

        Raises:
            InputError: the data cannot be read, or is not what the fields say; file, row, column are named.
        """
        return self._contents.prompts[split]

    @property
    def dropped(self) -> Counter[str]:
        """Rows left out: `duplicate` of another, `heldout` in the training data, `too_long`."""
        return self._contents.dropped

    def prepare(self) -> None:
        """Load what `verify` needs."""
        self.verifier.prepare()

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Judge the text of a completion (without its end token)."""
        return self.verifier.verify(prompt, text)

    def without(self, ids: frozenset[str]) -> Dataset | None:
        """The same data without the prompts of these ids, where `too_long` has them dropped.

        Raises:
            InputError: a split has no other prompts.
        """
        if self.too_long == "error":
            return None
        kept: dict[Split, list[Prompt]] = {
            split: [prompt for prompt in prompts if prompt.id not in ids]
            for split, prompts in self._contents.prompts.items()
        }
        for split, prompts in kept.items():
            if not prompts:
                raise InputError(f"{self.path}: every prompt of the {split} split is too long")
        other = replace(self)
        dropped = self.dropped + Counter(too_long=len(ids))
        other.__dict__["_contents"] = _Contents(kept, dropped)  # as the cache of `_contents` holds it
        return other

    @cached_property
    def _contents(self) -> _Contents:
        dropped: Counter[str] = Counter()
        main = self._distinct(self.path, self.split, "dataset", dropped)
        if self.heldout_path is None and self.heldout_split is None:
            if len(main) <= self.heldout:
                there = f"{self.path}: there are {len(main)} different prompts"
                raise InputError(
                    f"{there}, and task.heldout holds out {self.heldout}: none is left to train on"
                )
            held = dict(self._drawn(main.items(), self.heldout))
        else:
            path, split = self.heldout_path or self.path, self.heldout_split or self.split
            own = self._distinct(path, split, "heldout", dropped)
            held = dict(self._drawn(own.items(), self.heldout))
            dropped["heldout"] = len(main.keys() & own.keys())
            main = {text: prompt for text, prompt in main.items() if text not in own}
        left = [(text, prompt) for text, prompt in main.items() if text not in held]
        train = [prompt for _, prompt in self._drawn(left, self.limit)]
        for split, prompts in (("held-out", held), ("training", train)):
            if not prompts:
                raise InputError(f"{self.path}: no {split} prompt")
        return _Contents({"heldout": list(held.values()), "train": train}, +dropped)

    def _distinct(self, path: str, split: str, name: str, dropped: Counter[str]) -> dict[str, Prompt]:
        """The prompts of some data by the text of their rows, where white space does not count."""
        columns = [column for column in (self.prompt, self.answer, self.id) if column is not None]
        found: dict[str, Prompt] = {}
        places: dict[str, str] = {}
        for row in read_rows(path, self.subset, split, columns):
            messages = self._conversation(row)
            text = " ".join(" ".join(content for _, content in messages).split())
            prompt = self._prompt(row, name, messages)
            _check_unicode(row, text + prompt.answer)
            if text in found:
                dropped["duplicate"] += 1
                continue
            if prompt.id in places:
                raise InputError(f"{row.place}: the id {prompt.id!r} is also that of {places[prompt.id]}")
            places[prompt.id] = row.place
            found[text] = prompt
        return found

    def _drawn(self, prompts: Iterable[tuple[str, Prompt]], n: int | None) -> list[tuple[str, Prompt]]:
        """`n` of the prompts, by a hash of seed and text, in their order."""
        prompts = list(prompts)
        if n is None or n >= len(prompts):
            return prompts
        keys = [hashlib.blake2b(f"{self.seed}\0{text}".encode()).digest() for text, _ in prompts]
        chosen = sorted(range(len(prompts)), key=keys.__getitem__)[:n]
        return [prompts[i] for i in sorted(chosen)]

    def _conversation(self, row: DatasetRow) -> list[tuple[str, str]]:
        """What the row says, as chat messages (role, content)."""
        found = row.get(self.prompt)
        if isinstance(found, str) and found.strip():
            return [("user", found)]
        if isinstance(found, list) and self.chat_template:
            messages = _messages(found, row, self.prompt)
            return [m for m in messages if self.system is None or m[0] != "system"]
        wanted = "a text or messages" if self.chat_template else "a text (task.chat_template is false)"
        raise InputError(f"{row.place}: column {self.prompt!r} must be {wanted}, found {brief(found)}")

    def _prompt(self, row: DatasetRow, name: str, messages: list[tuple[str, str]]) -> Prompt:
        number = row.number if self.id is None else row.get(self.id)
        last = messages[-1][1]
        shown = [*messages[:-1], ("user", (self.template or _SLOT).replace(_SLOT, last))]
        text = "\n\n".join(content for role, content in shown if role != "system")
        if self.system is not None:
            shown.insert(0, ("system", self.system))
        return Prompt(
            f"{name}/{number}", text, self._answer(row), tuple(shown) if self.chat_template else None
        )

    def _answer(self, row: DatasetRow) -> str:
        found = row.get(self.answer)
        if isinstance(found, str) and found.strip():
            return found
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return str(found)
        if isinstance(found, list | dict) and self.verifier.takes_json:
            return json.dumps(found, ensure_ascii=False, default=str)
        inside = f": name what is inside, as in {self.answer}.0" if isinstance(found, list | dict) else ""
        raise InputError(
            f"{row.place}: column {self.answer!r} must be a text or a number, found {brief(found)}{inside}"
        )


def _check_unicode(row: DatasetRow, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can hold and no tokenizer takes
        raise InputError(f"{row.place}: {brief(error.object[error.start])} is no character") from error


def _messages(found: list[Any], row: DatasetRow, column: str) -> list[tuple[str, str]]:
    """Chat messages, of which the last is the user's."""
    messages = [(m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None) for m in found]
    where = f"{row.place}: column {column!r}"
    for message in messages:
        if not all(isinstance(part, str) for part in message):
            raise InputError(f"{where}: messages must be {{role, content}}, both texts, found {brief(found)}")
    if not messages or messages[-1][0] != "user":
        raise InputError(f"{where}: the last message must be of role 'user', found {brief(found)}")
    return [(str(role), str(content)) for role, content in messages]
