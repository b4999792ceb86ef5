"""Kinds: the dataclass that `kind` names in a table, a variant of the package or a custom class of the user.

cispo                      a variant of the package
my_package.losses:Topr     a custom class, by any name that `scalerl.own_code` accepts
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any, TypeVar, get_args, get_type_hints

from scalerl.errors import InputError, brief, in_one_line, nearest
from scalerl.own_code import OWN, Group, find, is_own, name_of

_LOG = logging.getLogger("scalerl")
_Mark = TypeVar("_Mark")


@dataclass(frozen=True)
class Choice:
    """Marks a field whose table is one of several dataclasses: `Annotated[Loss, Choice(...)]`."""

    group: Group
    protocol: type
    """The protocol that each class must satisfy."""
    built_in: Any
    """The variants of the package: a union of dataclasses, each with its name as the `Literal` of `kind`."""
    try_out: Callable[[Any], None] | None = None
    """Calls an object of a custom class once, and raises an InputError if it does not do what it should."""
    each: bool = False
    """Whether the field maps names to such tables, instead of being one."""

    @property
    def variants(self) -> dict[str, type]:
        """The variants of the package, by `kind`."""
        return {get_args(get_type_hints(one)["kind"])[0]: one for one in get_args(self.built_in)}

    def own(self, kind: Any) -> type | None:
        """Return the custom class that `kind` names, checked; None for a variant of the package or no string.

        Raises:
            InputError: there is no such kind, it cannot be loaded, or does not satisfy the protocol.
        """
        if not isinstance(kind, str):
            return None
        if kind in self.variants:
            _warn_of_namesakes(kind, self.group)
            return None
        try:
            cls = find(kind, self.group)
        except InputError as error:
            raise InputError(f"{error}; the kinds are {self.names()}") from error
        if cls is None:
            near = nearest(kind, self._known())
            hint = f"did you mean {near!r}? " if near else ""
            raise InputError(f"no kind {brief(kind)}; {hint}the kinds are {self.names()}")
        self.check(cls, kind)
        return cls

    def make(self, kind: str) -> Any:
        """Return an object of the custom class that `kind` names, with its defaults; None if it names none.

        Raises:
            InputError: the class cannot be loaded, does not satisfy the protocol, or has no defaults.
        """
        cls = find(kind, self.group)
        if cls is None:
            return None
        self.check(cls, kind)
        with in_one_line(f"{kind} cannot be made, as every field needs a default"):
            return cls()

    def check(self, cls: Any, name: str) -> None:
        """Check a custom class, which messages call `name`.

        Raises:
            InputError: it is not a frozen dataclass, or lacks a member of the protocol.
        """
        if not isinstance(cls, type):
            raise InputError(f"{name} is not a class; the kinds are {self.names()}")
        parameters = vars(cls).get("__dataclass_params__")  # an inherited one would pass undecorated classes
        if parameters is None or not parameters.frozen:
            raise InputError(
                f"{name} must be a frozen dataclass: put @dataclass(frozen=True) before the class"
            )
        for member, required in _members(self.protocol).items():
            found = _member(cls, member)
            shown = member + (str(_parameters(required)) if inspect.isfunction(required) else "")
            if found is None or getattr(found, "__isabstractmethod__", False):
                raise InputError(
                    f"{name} has no {shown}, which the protocol {self.protocol.__name__} requires"
                )
            if inspect.isfunction(required) and not _takes(found, len(_parameters(required).parameters)):
                raise InputError(f"{name}: {member} must take the arguments of {shown}")

    def check_object(self, value: object, name: str) -> None:
        """Check the class of an object, and try it out, unless it is a variant of the package."""
        if not isinstance(value, get_args(self.built_in)):
            self.check(type(value), f"{name}: {type(value).__name__}")
            if self.try_out is not None:
                self.try_out(value)

    def names(self) -> str:
        """Return the kinds that may be named, for messages."""
        return f"{', '.join(self._known())}, or {OWN}"

    def _known(self) -> list[str]:
        announced = {entry.name for entry in entry_points(group=f"scalerl.{self.group}")}
        return [*self.variants, *sorted(announced - self.variants.keys())]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return a schema that validates tables of the package's variants and passes dataclass objects."""
        from typing import Annotated

        from pydantic import Discriminator
        from pydantic_core import core_schema

        def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
            # Custom objects were made and checked before: pydantic knows only the variants of the package.
            return value if is_dataclass(value) else built_in(value)

        variants = handler(Annotated[self.built_in, Discriminator("kind")])
        one = core_schema.no_info_wrap_validator_function(validate, variants)
        return core_schema.dict_schema(core_schema.str_schema(), one) if self.each else one


_announced = lru_cache(entry_points)  # takes 10 ms, paid once for all kinds of a recipe


@lru_cache
def _warn_of_namesakes(kind: str, group: Group) -> None:
    """Warn once per process that the package's variant is used although others announce the same kind."""
    for entry in _announced().select(group=f"scalerl.{group}", name=kind):
        _LOG.warning(
            "kind %s: scalerl's own; an installed package announces one, too: to have that, give kind %s",
            kind,
            entry.value,
        )


@dataclass(frozen=True)
class InFiles:
    """Marks a field that also takes objects in Python: `Annotated[str | Recipe, InFiles(str)]`."""

    hint: Any
    """The type of the field in a file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the field in a file, as only files are validated."""
        return handler(self.hint)


@lru_cache
def choices_of(cls: type) -> dict[str, Choice]:
    """Return the fields of a dataclass that are choices."""
    return _marks(cls, Choice)


def _marks(cls: type, of: type[_Mark]) -> dict[str, _Mark]:
    """Return the marks of one type on the fields of a dataclass."""
    return {
        name: mark
        for name, hint in get_type_hints(cls, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, of)
    }


def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields as in files; a choice has the union of its variants."""
    one = {name: choice.built_in for name, choice in choices_of(cls).items() if not choice.each}
    hints = get_type_hints(cls) | one | {name: mark.hint for name, mark in _marks(cls, InFiles).items()}
    return {item.name: hints[item.name] for item in fields(cls) if item.init}


def values_of(made: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values, each choice with its `kind`.

    Raises:
        InputError: a value cannot be written to a file.
    """
    choices = choices_of(type(made))
    values = {}
    for item in (item for item in fields(made) if item.init):
        value = getattr(made, item.name)
        if item.name not in choices:
            values[item.name] = _plain(value, f"{type(made).__name__}.{item.name}")
        elif choices[item.name].each:
            values[item.name] = {name: _chosen(one) for name, one in value.items()}
        else:
            values[item.name] = _chosen(value)
    return values


def tables_of(value: Any) -> Any:
    """Return changes of a recipe with every dataclass in them as a table of its fields and its kind.

    Raises:
        InputError: a value of a dataclass cannot be written to a file.
    """
    if is_dataclass(value):
        has_kind = is_own(type(value)) or hasattr(value, "kind")
        return _chosen(value) if has_kind else values_of(value)
    if isinstance(value, Mapping):
        return {key: tables_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(tables_of(item) for item in value)
    return value


def _chosen(value: Any) -> dict[str, Any]:
    return values_of(value) | {"kind": kind_of(value)}


def _plain(value: Any, name: str) -> Any:
    if is_dataclass(value):
        return values_of(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, name) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_plain(item, name) for item in value)
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise InputError(f"{name}: {brief(value)} cannot be in a recipe: use texts, numbers, lists and tables")


def kind_of(value: Any) -> str:
    """Return the kind of an object: `kind` for a variant of the package, else the name of its class."""
    cls = type(value)
    return name_of(cls) if is_own(cls) else value.kind


def _members(protocol: type) -> dict[str, Any]:
    """Return the members of a protocol by name: functions, properties and attributes."""
    found: dict[str, Any] = dict.fromkeys(vars(protocol).get("__annotations__", ()))
    for base in reversed(protocol.__mro__):
        for name, value in vars(base).items():
            own = isinstance(value, property) or getattr(value, "__module__", "") == protocol.__module__
            if own and (name == "__call__" or not name.startswith("_")):
                found[name] = value
    return found


def _member(cls: type, name: str) -> Any:
    """Return a member of a class, or the name of a field; getattr would find the metaclass's `__call__`."""
    if name in getattr(cls, "__dataclass_fields__", {}):
        return name
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _parameters(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method without `self` and annotations."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return inspect.Signature(bare[1:])


def _takes(function: Any, n: int) -> bool:
    """Whether a method can be called with `n` positional arguments."""
    if not callable(function):
        return isinstance(function, staticmethod | classmethod)
    try:
        inspect.signature(function).bind(*[None] * (n + 1))
    except TypeError:
        return False
    return True
