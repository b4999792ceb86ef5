"""`dataset`: prompts and answers from a file, a folder or the Hugging Face Hub, with a choice of verifier.

    rows -> prompts (system, template) -> without duplicates -> held out | train -> limit

Which prompts are held out, or kept by a limit, depends only on the seed and the texts: not on the order of
the rows, and hardly on rows that are added later.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from scalerl.errors import InputError, brief, first_line
from scalerl.jsonl import read_jsonl
from scalerl.kinds import Choice
from scalerl.rl.tasks.task import SLOT, Task, check_presentation
from scalerl.rl.tasks.verifiers import Exact, Function, Math, Trl, Verifier, Verl
from scalerl.rl.types import Limits, Prompt, Reward, Split

_WHOLE_ROW = "*"
_OF_THE_LOADER = {
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "tokenize",
    "chat_template",
}
"""Arguments of `apply_chat_template` that are not variables of the template."""
AnyVerifier = Math | Exact | Function | Trl | Verl
"""The verifiers of the package that a recipe can name."""
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can hold but no tokenizer accepts."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Dataset(Task):
    """Prompts and answers of a data set; `docs/howto/tasks.md` explains every field."""

    path: str
    """A .jsonl or .parquet file, a folder, or a name on the Hugging Face Hub."""
    kind: Literal["dataset"] = "dataset"
    subset: str | None = None
    split: str = "train"
    """The split of a folder or of a data set on the Hub."""
    heldout_path: str | None = None
    heldout_split: str | None = None
    """The source of the held-out prompts; without both, they are drawn from the prompts of `path`."""
    heldout: int = 1000
    """Number of prompts to hold out: exact if drawn from `path`, a maximum with a separate source."""
    limit: int | None = None
    """Maximum number of training prompts."""
    seed: int = 0
    """Seed of the choice of held-out prompts, and of those that `limit` keeps."""
    prompt: str = "prompt"
    """The column of a text or of chat messages; `a.b` is field b of column a."""
    answer: str = "answer"
    """The column of a text or a number, or for some verifiers a list or an object; `*` is the whole row."""
    id: str | None = None
    system: str | None = None
    """A system prompt that replaces that of the data."""
    template: str | None = None
    """Text around the prompt, which replaces `{prompt}`; with messages, around the last one."""
    chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template, or are tokenized as they are."""
    chat_template_args: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking = false`."""
    too_long: Literal["error", "drop"] = "error"
    """Whether prompts longer than `context.prompt` are an error or are dropped."""
    verifier: Annotated[Verifier, Choice("verifiers", Verifier, AnyVerifier)] = field(default_factory=Math)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.heldout < 1 or self.seed < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError("heldout and limit must be at least 1, and seed not negative")
        check_presentation(self.template, self.system, self.chat_template)
        if self.chat_template_args and not self.chat_template:
            raise ValueError("chat_template_args needs chat_template = true")
        if taken := self.chat_template_args.keys() & _OF_THE_LOADER:
            what = f"{min(taken)} is not a variable of a chat template"
            raise ValueError(f"chat_template_args: {what}; leave it out")

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split, in the order of the rows.

        Raises:
            InputError: the data cannot be read, or does not fit the fields (named by file, row and column).
        """
        prompts = self._contents[0][split]
        if not prompts:
            raise InputError(f"{self.path}: no training prompt")
        return prompts

    @property
    def dropped(self) -> Counter[str]:
        """The number of rows left out: `duplicate`, `heldout` in the training data, `too_long`."""
        return self._contents[1]

    def prepare(self) -> None:
        """Load what `verify` needs."""
        self.verifier.prepare()

    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify the text of a completion (without its end token)."""
        return self.verifier.verify(prompt, text)

    def reference(self, prompt: Prompt) -> str | None:
        """Return a right answer, as found by the verifier."""
        return self.verifier.reference(prompt)

    def without(self, ids: frozenset[str]) -> Dataset | None:
        """Return the data without the prompts of these ids, or None if `too_long` is "error".

        Raises:
            InputError: a split has no other prompts.
        """
        if self.too_long == "error":
            return None
        kept: dict[Split, list[Prompt]] = {
            split: [prompt for prompt in prompts if prompt.id not in ids]
            for split, prompts in self._contents[0].items()
        }
        for split, prompts in kept.items():
            if not prompts and self._contents[0][split]:
                raise InputError(f"{self.path}: every prompt of the {split} split is too long")
        other = replace(self)
        # Set the value of the cached property directly, as the dataclass is frozen.
        other.__dict__["_contents"] = kept, self.dropped + Counter(too_long=len(ids))
        return other

    @cached_property
    def _contents(self) -> tuple[dict[Split, list[Prompt]], Counter[str]]:
        """The prompts of the two splits, and how many rows were left out, by reason."""
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
        if not held:
            raise InputError(f"{self.path}: no held-out prompt")
        # Without training prompts it may be a benchmark: `prompts` raises if they are needed.
        return {"heldout": list(held.values()), "train": train}, +dropped

    def _distinct(self, path: str, split: str, name: str, dropped: Counter[str]) -> dict[str, Prompt]:
        """Return the prompts of a source by the text of their rows, with white space normalised."""
        named = [column for column in (self.prompt, self.answer, self.id) if column is not None]
        columns = None if self.answer == _WHOLE_ROW else named
        found: dict[str, Prompt] = {}
        places: dict[str, str] = {}
        for row in _read_rows(path, self.subset, split, columns):
            messages = self._conversation(row)
            text = " ".join(" ".join(content for _, content in messages).split())
            prompt = self._prompt(row, name, messages)
            if half := _HALF.search(text + prompt.answer):
                raise InputError(f"{row.place}: {brief(half[0])} is no character")
            if text in found:
                dropped["duplicate"] += 1
                continue
            if prompt.id in places:
                raise InputError(f"{row.place}: the id {prompt.id!r} is also that of {places[prompt.id]}")
            places[prompt.id] = row.place
            found[text] = prompt
        return found

    def _drawn(self, prompts: Iterable[tuple[str, Prompt]], n: int | None) -> list[tuple[str, Prompt]]:
        """Return `n` of the prompts, chosen by a hash of seed and text, in their original order."""
        prompts = list(prompts)
        if n is None or n >= len(prompts):
            return prompts
        keys = [hashlib.blake2b(f"{self.seed}\0{text}".encode()).digest() for text, _ in prompts]
        chosen = sorted(range(len(prompts)), key=keys.__getitem__)[:n]
        return [prompts[i] for i in sorted(chosen)]

    def _conversation(self, row: DatasetRow) -> list[tuple[str, str]]:
        """Return the prompt of a row as chat messages (role, content)."""
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
        shown = [*messages[:-1], ("user", (self.template or SLOT).replace(SLOT, last))]
        text = "\n\n".join(content for role, content in shown if role != "system")
        if self.system is not None:
            shown.insert(0, ("system", self.system))
        messages_of_chat = tuple(shown) if self.chat_template else None
        arguments = tuple(self.chat_template_args.items())
        return Prompt(f"{name}/{number}", text, self._answer(row), messages_of_chat, arguments)

    def _answer(self, row: DatasetRow) -> str:
        found = row.values if self.answer == _WHOLE_ROW else row.get(self.answer)
        if isinstance(found, str) and found.strip():
            return found
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return str(found)
        if isinstance(found, list | Mapping) and self.verifier.takes_json:
            return json.dumps(found, ensure_ascii=False, default=str)
        inside = f": name what is inside, e.g. {self.answer}.0" if isinstance(found, list | Mapping) else ""
        raise InputError(
            f"{row.place}: column {self.answer!r} must be a text or a number, found {brief(found)}{inside}"
        )


def _messages(found: list[Any], row: DatasetRow, column: str) -> list[tuple[str, str]]:
    """Return chat messages, the last of which is the user's."""
    messages = [(m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None) for m in found]
    where = f"{row.place}: column {column!r}"
    for message in messages:
        if not all(isinstance(part, str) for part in message):
            raise InputError(f"{where}: messages must be {{role, content}}, both texts, found {brief(found)}")
    if not messages or messages[-1][0] != "user":
        raise InputError(f"{where}: the last message must be of role 'user', found {brief(found)}")
    return [(str(role), str(content)) for role, content in messages]


@dataclass(frozen=True)
class DatasetRow:
    """One row of a file or data set: its place (for messages), its number from 1, its values by column."""

    place: str
    number: int
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """Return the value of a column; `a.b.0` goes into the objects and the lists of column `a`.

        Raises:
            InputError: there is no such column.
        """
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        try:
            for part in column.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError) as error:
            there = ", ".join(map(str, self.values))
            raise InputError(f"{self.place}: no column {column!r}; there are: {there}") from error
        return value


def _read_rows(path: str, subset: str | None, split: str, columns: Sequence[str] | None) -> list[DatasetRow]:
    """Return the rows of a JSONL or Parquet file, of a folder, or of a data set of the Hugging Face Hub.

    `subset` and `split` apply to the last two. From Parquet and data sets, only `columns` are read if given.
    """
    file = Path(path)
    if file.suffix in (".jsonl", ".ndjson"):
        return _jsonl(file)
    if file.suffix == ".parquet":
        return _parquet(file, columns)
    if file.is_file():
        raise InputError(f"{path}: expected a .jsonl or .parquet file, a folder, or a name on the Hub")
    if not file.is_dir() and not _HUB_NAME.fullmatch(path):
        raise InputError(f"{path}: no such file or folder")
    return _data_set(path, subset, split, columns)


def _jsonl(file: Path) -> list[DatasetRow]:
    unfinished: list[str] = []
    rows = read_jsonl(file, unfinished)
    if unfinished:
        raise InputError(f"{file}: the last line is unfinished: not JSON")
    return [DatasetRow(f"{file}, line {number}", number, values) for number, values in rows]


def _parquet(file: Path, columns: Sequence[str] | None) -> list[DatasetRow]:
    parquet = _library("pyarrow.parquet")
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        table = parquet.ParquetFile(file)
        values = table.read(columns=_wanted(str(file), table.schema_arrow.names, columns)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise InputError(f"{file}: not Parquet ({first_line(error)})") from error
    return [DatasetRow(f"{file}, row {number}", number, row) for number, row in enumerate(values, start=1)]


def _data_set(path: str, subset: str | None, split: str, columns: Sequence[str] | None) -> list[DatasetRow]:
    datasets = _library("datasets")
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises a dozen types
        where = "" if Path(path).is_dir() else " from the Hub, and there is no such file or folder"
        raise InputError(f"{path}: cannot be loaded{where} ({first_line(error)})") from error
    if isinstance(found, dict):
        if split not in found:
            raise InputError(f"{path}: no split {split!r}; there are: {', '.join(found)}")
        found = found[split]
    source = f"{path}[{split}]"
    found = found.select_columns(_wanted(source, found.column_names, columns))
    return [DatasetRow(f"{source}, row {number}", number, row) for number, row in enumerate(found, start=1)]


def _wanted(source: str, there: list[str], columns: Sequence[str] | None) -> list[str]:
    """Return the existing columns that `columns` name, in full or by the part before the first dot."""
    wanted = set()
    for column in there if columns is None else columns:
        found = {column, column.partition(".")[0]} & set(there)
        if not found:
            raise InputError(f"{source}: no column {column!r}; there are: {', '.join(there)}")
        wanted |= found
    return sorted(wanted)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(f"this data needs {package}: pip install 'scalerl[data]'") from error
