"""Values written by hand (TOML files, overrides on the command line), checked against a dataclass.

A table with several variants, each a dataclass, names one in its field `kind`. If the field is marked as a
`Choice`, `kind` may also name a custom class (`scalerl.own_code`). Messages show dotted keys as written.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from scalerl import limits
from scalerl.errors import InputError, brief, brief_error
from scalerl.files import open_input
from scalerl.kinds import Choice, choices_of, hints_of
from scalerl.own_code import check_picklable, name_of

T = TypeVar("T")
_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "a path",
    **dict.fromkeys(("tuple_type", "list_type"), "a list, e.g. [1, 2]"),
    **dict.fromkeys(("dict_type", "dataclass_type", "model_attributes_type"), "a table"),
}
"""What was expected, in the words of TOML instead of Python, by the type of pydantic's error."""
_PART = r"""[\w"'-]+[ \t]*\.[ \t]*"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{_PART}){{{limits.DEPTH.most}}}""")
"""A key of too many parts; the time of `tomllib` grows with the square of their number."""


class Form(Generic[T]):
    """Builds a dataclass from plain values."""

    def __init__(self, cls: type[T], prefix: str = "") -> None:
        """Take the class, and the `prefix` of keys in messages, for a table within another form."""
        self._cls, self._prefix = cls, prefix
        self._adapter = TypeAdapter(cls)

    def build(self, values: Mapping[str, Any], source: str) -> T:
        """Check `values` and build the object; `source` names them in messages.

        Raises:
            InputError: a key is unknown (the message names the nearest one) or missing, or a value is out of
                range.
        """
        values = self._checked(self._cls, values, source, self._prefix, values)
        try:
            return self._adapter.validate_python(values)
        except ValidationError as error:
            raise InputError(f"{source}: {self._explain(error)}") from error

    def _checked(
        self, cls: Any, values: Mapping[str, Any], source: str, prefix: str, whole: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values, with an object in place of each table whose kind is a custom class.

        `whole` is the tree of values that these are a part of.
        """
        hints, choices, checked = hints_of(cls), choices_of(cls), dict(values)
        for key, value in values.items():
            if key not in hints:
                known = _keys(self._cls, self._prefix, whole)
                close = [
                    near
                    for near in difflib.get_close_matches(prefix + key, known, n=1, cutoff=0.5)
                    # A long common prefix says nothing about the key itself.
                    if difflib.SequenceMatcher(None, key, near.rpartition(".")[2]).ratio() > 0.5
                ]
                hint = f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(hints)}"
                if prefix + key in _keys(self._cls, self._prefix):
                    hint = f"with {prefix}kind = {values.get('kind')!r} the keys are {', '.join(hints)}"
                raise InputError(f"{source}: unknown key {brief(prefix + key)}; {hint}")
            if not _may_be_bool(hints[key]) and any(isinstance(one, bool) for one in _entries(value)):
                raise InputError(f"{source}: {prefix}{key}: cannot be true or false (found {brief(value)})")
            if key in choices and isinstance(value, Mapping):
                if choices[key].each:
                    checked[key] = {
                        name: self._chosen(choices[key], table, source, f"{prefix}{key}.{name}.", whole)
                        for name, table in value.items()
                    }
                else:
                    checked[key] = self._chosen(choices[key], value, source, f"{prefix}{key}.", whole)
                continue
            entries = list(_entries(value))
            for place, table in enumerate(entries):
                if isinstance(table, Mapping):
                    for variant in _fitting(_variants(hints[key]), table):
                        entries[place] = self._checked(variant, table, source, f"{prefix}{key}.", whole)
            if any(isinstance(entry, Mapping) for entry in entries):
                checked[key] = entries[0] if isinstance(value, Mapping) else entries
        return checked

    def _chosen(self, choice: Choice, table: Any, source: str, prefix: str, whole: Mapping[str, Any]) -> Any:
        """Return the checked table of a choice, or an object if its kind is a custom class."""
        if not isinstance(table, Mapping):
            raise InputError(f"{source}: {prefix[:-1]}: expected a table, found {brief(table)}")
        made = _own(choice, table, source, prefix)
        if made is not None:
            return made
        checked = table
        for variant in _fitting(_variants(choice.built_in), table):
            checked = self._checked(variant, table, source, prefix, whole)
        return checked

    def _explain(self, error: ValidationError) -> str:
        """Return the first error in one line, with the key as the user wrote it."""
        first, *others = error.errors()
        known = _keys(self._cls)
        where = _where(first["loc"], known)
        key = self._prefix + ".".join(where) if where else self._prefix.removesuffix(".")
        if first["type"] == "missing":
            return f"missing key {key!r}"
        if first["type"] == "union_tag_not_found":
            return f"missing key '{key}.kind'"
        if first["type"] in ("union_tag_invalid", "literal_error"):
            context = first.get("ctx", {})
            expected = context.get("expected_tags") or context.get("expected")
            return f"{key}: found {brief(first['input'])}, expected {expected}"
        # A key of several types has an error for each, and a list one for its wrong entry, the deepest.
        same = [one for one in (first, *others) if _where(one["loc"], known) == where]
        deepest = max(len(one["loc"]) for one in same)
        first, *others = [one for one in same if len(one["loc"]) == deepest]
        expected = {_WORDS.get(one["type"], ""): None for one in (first, *others)}
        if all(expected) and key:
            return f"{key}: expected {' or '.join(expected)}, found {brief(first['input'])}"
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        found = "" if isinstance(first["input"], Mapping) else f" (found {brief(first['input'])})"
        return f"{key}: {message}{found}" if key else message


def _own(choice: Choice, table: Mapping[str, Any], source: str, prefix: str) -> Any:
    """Return the object of a table whose kind is a custom class; None for any other kind."""
    try:
        cls = choice.own(table.get("kind"))
    except InputError as error:
        raise InputError(f"{source}: {prefix}kind: {error}") from error
    if cls is None:
        return None
    try:
        form = Form(cls, prefix)
    except (PydanticUserError, NameError) as error:
        why = f"{name_of(cls)} has a field whose type no recipe can check ({brief_error(error)})"
        raise InputError(f"{source}: {prefix}kind: {why}") from error
    made = form.build({key: value for key, value in table.items() if key != "kind"}, source)
    check_picklable(made, f"{source}: {prefix[:-1]}: {name_of(cls)}")
    return made


def _where(loc: Sequence[int | str], known: set[str]) -> list[str]:
    """Return the parts of the key at which pydantic found an error, without its tags of variants."""
    where: list[str] = []
    for part in map(str, loc):
        if ".".join([*where, part]) in known:
            where.append(part)
    return where


def _entries(value: Any) -> Sequence[Any]:
    """Return the entries of a list; any other value as its only entry."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _may_be_bool(hint: Any) -> bool:
    """Return whether a type accepts booleans; pydantic would also accept them as 1 and 0 for numbers."""
    return hint in (bool, Any) or any(_may_be_bool(part) for part in get_args(hint))


def _fitting(variants: list[Any], table: Mapping[str, Any]) -> list[Any]:
    """Return the variants to check a table against: that of its kind (a wrong kind is reported later)."""
    if len(variants) < 2:
        return variants
    return [v for v in variants if table.get("kind") in get_args(hints_of(v).get("kind"))]


def _variants(hint: Any) -> list[Any]:
    """Return the dataclasses that a type, or the entries of its list, can be."""
    return [part for part in (hint, *get_args(hint)) if is_dataclass(part)]


def _keys(cls: Any, prefix: str = "", values: Mapping[str, Any] | None = None) -> set[str]:
    """Return every dotted key of a dataclass; of a choice those of its kind in `values`, else of all."""
    keys = set()
    for name, hint in hints_of(cls).items():
        keys.add(prefix + name)
        table = (values or {}).get(name)
        table = table if isinstance(table, Mapping) else {}
        for variant in _fitting(_variants(hint), table) or _variants(hint):
            keys |= _keys(variant, f"{prefix}{name}.", table)
    return keys


# -- TOML ---------------------------------------------------------------------------------------------------


def parse_toml(path: Path | Traversable, source: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file, which messages call `source`.

    Raises:
        InputError: it cannot be read, is not TOML, or exceeds the limits.
    """
    try:
        with open_input(path) if isinstance(path, Path) else path.open("rb") as file:
            data = file.read(limits.TOML.most + 1)
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror})") from error
    limits.TOML.check(len(data), source)
    try:
        return _loads(data.decode("utf-8").replace("\r\n", "\n"), str(source))
    except ValueError as error:  # also for text in another encoding and for endless numbers
        raise InputError(f"{source}: not TOML ({error})") from error


def _loads(text: str, source: str) -> dict[str, Any]:
    deep = InputError(f"{source}: more than {limits.DEPTH.most} levels of nesting, which is the limit")
    if _DEEP_KEY.search(text):
        raise deep
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    level: list[Any] = [values]
    for _ in range(limits.DEPTH.most + 1):
        tables = [value.values() for value in level if isinstance(value, dict)]
        lists = [value for value in level if isinstance(value, list)]
        level = [inner for entries in (*tables, *lists) for inner in entries]
    if level:
        raise deep
    return values


def add_override(changes: dict[str, Any], override: str, option: str = "--set") -> None:
    """Add `override`, a string like `loss.max_ratio=4` that was given to `option`, to a tree of changes.

    Raises:
        InputError: it is not a key and a value, or a part of the key is a value already.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"{option} {override}: expected key=value")
    try:
        value = _loads(f"v = {text}", f"{option} {key}")["v"]
    except ValueError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    limits.DEPTH.check(len(parents), f"{option} {key[:60]}...")
    for parent in parents:
        changes = changes.setdefault(parent, {})
        if not isinstance(changes, dict):
            raise InputError(f"{option} {override}: {parent!r} is a value, not a table")
    changes[last] = value
