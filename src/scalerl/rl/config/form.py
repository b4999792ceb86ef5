"""Values written by hand (TOML) checked against a dataclass, with complaints in the words of who wrote them.

Where variants may stand at one place, each a dataclass, their field `kind` tells them apart. Where the
place is marked as a `Choice`, `kind` may also name a class of the user's own (`scalerl.kinds`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, get_args

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from scalerl.errors import InputError, brief, brief_error
from scalerl.kinds import OWN, Choice, choices_of, hints_of, name_of

T = TypeVar("T")
_WORDS = {
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list, as in [1, 2]"),
    **dict.fromkeys(("dict_type", "dataclass_type", "model_attributes_type"), "expected a table"),
}
"""Of pydantic's complaints that speak of Python, by their types."""


class Form(Generic[T]):
    """Builds a dataclass from plain values."""

    def __init__(self, cls: type[T], prefix: str = "") -> None:
        """`prefix` stands before the keys in complaints: those of a table in another form."""
        self._cls, self._prefix = cls, prefix
        self._adapter = TypeAdapter(cls)

    def build(self, values: Mapping[str, Any], source: str) -> T:
        """Check `values` and build the object; `source` names them in complaints.

        Raises:
            InputError: an unknown key (the nearest valid one is named), a missing one, or a value out of
                range.
        """
        values = self._checked(self._cls, values, source, self._prefix)
        try:
            return self._adapter.validate_python(values)
        except ValidationError as error:
            raise InputError(f"{source}: {self._explain(error)}") from error

    def _checked(self, cls: Any, values: Mapping[str, Any], source: str, prefix: str) -> dict[str, Any]:
        """The values, with an object for each table of a kind of the user's own.

        Raises:
            InputError: the first key that no variant at its place knows, or what such a kind refuses.
        """
        hints, choices, checked = hints_of(cls), choices_of(cls), dict(values)
        for key, value in values.items():
            if key not in hints:
                known = _keys(self._cls, self._prefix)
                close = difflib.get_close_matches(prefix + key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(hints)}"
                if prefix + key in known:
                    hint = f"with {prefix}kind = {values.get('kind')!r} the keys are {', '.join(hints)}"
                raise InputError(f"{source}: unknown key {brief(prefix + key)}; {hint}")
            if not _may_be_bool(hints[key]) and any(isinstance(one, bool) for one in _entries(value)):
                raise InputError(f"{source}: {prefix}{key}: is neither true nor false (found {brief(value)})")
            if key in choices and isinstance(value, Mapping):
                made = _own(choices[key], value, source, f"{prefix}{key}.")
                if made is not None:
                    checked[key] = made
                    continue
            for table in _entries(value):
                if isinstance(table, Mapping):
                    for variant in _fitting(_variants(hints[key]), table):
                        inner = self._checked(variant, table, source, f"{prefix}{key}.")
                        if table is value:
                            checked[key] = inner
        return checked

    def _explain(self, error: ValidationError) -> str:
        """The first complaint in one line, in the words of who wrote the values."""
        first = error.errors()[0]
        known = _keys(self._cls)
        where: list[str] = []
        for part in map(str, first["loc"]):
            if ".".join([*where, part]) in known:  # what is no key is the tag of a variant
                where.append(part)
        key = self._prefix + ".".join(where) if where else self._prefix.removesuffix(".")
        if first["type"] == "missing":
            return f"missing key {key!r}"
        if first["type"] == "union_tag_not_found":
            return f"missing key '{key}.kind'"
        if first["type"] in ("union_tag_invalid", "literal_error"):
            context = first.get("ctx", {})
            expected = context.get("expected_tags") or context.get("expected")
            own = f", or {OWN}" if first["type"] == "union_tag_invalid" and _is_open(self._cls, where) else ""
            return f"{key}: found {brief(first['input'])}, expected {expected}{own}"
        message = _WORDS.get(first["type"], first["msg"].removeprefix("Value error, "))
        found = "" if isinstance(first["input"], Mapping) else f" (found {brief(first['input'])})"
        return f"{key}: {message}{found}" if key else message


def _own(choice: Choice, table: Mapping[str, Any], source: str, prefix: str) -> Any:
    """The object of a table whose kind is a class of the user's own; None where it is not."""
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
    return form.build({key: value for key, value in table.items() if key != "kind"}, source)


def _is_open(cls: Any, where: Sequence[str]) -> bool:
    """Whether the key at the end of `where` takes kinds of the user's own."""
    inner = [cls]
    for key in where[:-1]:
        inner = [variant for one in inner for variant in _variants(hints_of(one).get(key))]
    return any(where[-1] in choices_of(one) for one in inner)


def _entries(value: Any) -> Sequence[Any]:
    """Of a list, or the one value that it is."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _may_be_bool(hint: Any) -> bool:
    """Whether true and false may stand at a place; pydantic takes them for 1 and 0 where numbers do."""
    return hint in (bool, Any) or any(_may_be_bool(part) for part in get_args(hint))


def _fitting(variants: list[Any], table: Mapping[str, Any]) -> list[Any]:
    """The variants that a table is to be checked by: that of its kind (a wrong kind is said later)."""
    if len(variants) < 2:
        return variants
    return [v for v in variants if table.get("kind") in get_args(hints_of(v).get("kind"))]


def _variants(hint: Any) -> list[Any]:
    """The dataclasses that may stand at a place, or in a list there."""
    return [part for part in (hint, *get_args(hint)) if is_dataclass(part)]


def _keys(cls: Any, prefix: str = "") -> set[str]:
    """Every dotted key of a dataclass, those of all variants included."""
    keys = set()
    for name, hint in hints_of(cls).items():
        keys.add(prefix + name)
        for variant in _variants(hint):
            keys |= _keys(variant, f"{prefix}{name}.")
    return keys
