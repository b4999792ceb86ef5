"""Kinds: the dataclass that `kind` names in a table, a variant of the package or anyone's own.

    cispo                      a variant of the package
    my_package.losses:Topr     a class of a module that is installed, or is in the working folder
    losses.py:Topr             a class of a file, whose path is relative to the working folder
    topr                       what an installed package announces: an entry point of `scalerl.losses`

A file is a module below this one, under a name that holds its path. To unpickle an object is to import its
module, so that every process finds it by itself: spawned ones, ranks of torchrun, Ray actors, verifiers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import quote, unquote

from scalerl.errors import InputError, brief, brief_error

__path__: list[str] = []  # makes this a package, which modules of files can be in
_FILE = f"{__name__}."
_MAIN = ("__main__", "__mp_main__")
OWN = "your own as module:Class or file.py:Class"

Group = Literal[
    "losses",
    "advantages",
    "averagings",
    "curricula",
    "lengths",
    "tasks",
    "verifiers",
    "importers",
    "families",
]
"""Entry points of `scalerl.GROUP` announce kinds of a package."""


@dataclass(frozen=True)
class Choice:
    """Marks a field whose table is one of several dataclasses: `Annotated[Loss, Choice(...)]`."""

    group: Group
    protocol: type
    """What every one of them has."""
    built_in: Any
    """The variants of the package: a union of dataclasses, each with its name as the `Literal` of `kind`."""

    @property
    def variants(self) -> dict[str, type]:
        """The variants of the package by their kinds."""
        return {get_args(get_type_hints(one)["kind"])[0]: one for one in get_args(self.built_in)}

    def own(self, kind: Any) -> type | None:
        """The class that a `kind` names, checked; None of a variant of the package, and of what names none.

        Raises:
            InputError: it cannot be loaded, or is not what the protocol asks for.
        """
        if not isinstance(kind, str) or kind in self.variants:
            return None
        try:
            cls = find(kind, self.group)
        except InputError as error:
            raise InputError(f"{error}; the kinds are {self.names()}") from error
        if cls is not None:
            self.check(cls, kind)
        return cls

    def check(self, cls: Any, name: str) -> None:
        """Check a class that the user calls `name`.

        Raises:
            InputError: it is no frozen dataclass, or lacks a member of the protocol.
        """
        if not isinstance(cls, type):
            raise InputError(f"{name} is no class; the kinds are {self.names()}")
        parameters = vars(cls).get("__dataclass_params__")  # a base being one does not do
        if parameters is None or not parameters.frozen:
            raise InputError(
                f"{name} must be a frozen dataclass: put @dataclass(frozen=True) before the class"
            )
        for member, wanted in _members(self.protocol).items():
            found = _member(cls, member)
            shown = member + (str(_parameters(wanted)) if inspect.isfunction(wanted) else "")
            if found is None or getattr(found, "__isabstractmethod__", False):
                raise InputError(
                    f"{name} has no {shown}, which the protocol {self.protocol.__name__} asks for"
                )
            if inspect.isfunction(wanted) and not _takes(found, len(_parameters(wanted).parameters)):
                raise InputError(f"{name}: {member} must take the arguments of {shown}")

    def check_object(self, value: object, name: str) -> None:
        """The same of an object that is no variant of the package."""
        if not isinstance(value, get_args(self.built_in)):
            self.check(type(value), f"{name}: {type(value).__name__}")

    def names(self) -> str:
        """What may be named, for messages."""
        announced = [entry.name for entry in entry_points(group=f"scalerl.{self.group}")]
        return f"{', '.join([*self.variants, *sorted(announced)])}, or {OWN}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """For pydantic: a table of a variant of the package, or an object of any other kind as it is."""
        from typing import Annotated

        from pydantic import Discriminator
        from pydantic_core import core_schema

        def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
            return value if is_dataclass(value) else built_in(value)

        variants = handler(Annotated[self.built_in, Discriminator("kind")])
        return core_schema.no_info_wrap_validator_function(validate, variants)


@lru_cache
def choices_of(cls: type) -> dict[str, Choice]:
    """The fields of a dataclass that are choices."""
    return {
        name: mark
        for name, hint in get_type_hints(cls, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Choice)
    }


def hints_of(cls: type) -> dict[str, Any]:
    """The types of the fields of a dataclass, that of a choice being the union of the package's variants."""
    hints = get_type_hints(cls) | {name: choice.built_in for name, choice in choices_of(cls).items()}
    return {item.name: hints[item.name] for item in fields(cls) if item.init}


def values_of(made: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain values, each choice with its `kind`.

    Raises:
        InputError: a value that no file could hold.
    """
    choices = choices_of(type(made))
    values = {}
    for item in (item for item in fields(made) if item.init):
        value = getattr(made, item.name)
        values[item.name] = _plain(value, f"{type(made).__name__}.{item.name}")
        if item.name in choices:
            values[item.name]["kind"] = kind_of(value)
    return values


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
    raise InputError(f"{name}: {brief(value)} cannot stand in a recipe: use texts, numbers, lists and tables")


def kind_of(value: Any) -> str:
    """The kind of an object: its own word of a variant of the package, else where its class is."""
    cls = type(value)
    own = not cls.__module__.startswith("scalerl.") or cls.__module__.startswith(_FILE)
    return name_of(cls) if own else value.kind


def name_of(cls: type) -> str:
    """`module:Class`, or `path:Class` with the whole path of a class of a file or of the program.

    Raises:
        InputError: it was written at a prompt or in a notebook, where no other process finds it.
    """
    module = cls.__module__
    if module.startswith(_FILE):
        module = unquote(module.removeprefix(_FILE))
    elif module in _MAIN:
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise InputError(f"{cls.__qualname__}: put the class into a file, where other processes find it")
        module = str(Path(file).resolve())
    return f"{module}:{cls.__qualname__}"


def absolute(kind: str) -> str:
    """The kind of a file with its whole path; any other as it is."""
    source, colon, name = kind.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if colon and source.endswith(".py") else kind


def label(kind: str) -> str:
    """What a kind is called in a name: that of its class."""
    return kind.rpartition(":")[2]


def find(kind: str, group: Group) -> Any:
    """What a `kind` names in a module, a file or an entry point; None where it is no such name.

    Raises:
        InputError: it cannot be loaded.
    """
    if ":" in kind:
        return load(kind)
    for entry in entry_points(group=f"scalerl.{group}", name=kind):
        return load(entry.value)
    return None


def load(name: str) -> Any:
    """What `module:name` or `file.py:name` names.

    Raises:
        InputError: it cannot be loaded.
    """
    source, _, inner = name.rpartition(":")
    try:
        found: Any = _module(source)
        for part in inner.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a module of others does as it is loaded
        raise InputError(f"{name} cannot be loaded ({brief_error(error)})") from error
    return found


def _module(source: str) -> ModuleType:
    """A module by its name, or from its file."""
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        return importlib.import_module(_FILE + quote(str(path), safe="/ ").replace(".", "%2E"))
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # as `python -m` has it, and processes inherit it
        sys.path.append(here)
    return importlib.import_module(source)


class _Files(MetaPathFinder):
    """Finds the modules whose names hold the path of a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if not fullname.startswith(_FILE):
            return None
        return spec_from_file_location(fullname, unquote(fullname.removeprefix(_FILE)))


sys.meta_path.append(_Files())


def _members(protocol: type) -> dict[str, Any]:
    """The members of a protocol by name: functions, properties and attributes."""
    found: dict[str, Any] = dict.fromkeys(vars(protocol).get("__annotations__", ()))
    for base in reversed(protocol.__mro__):
        for name, value in vars(base).items():
            own = isinstance(value, property) or getattr(value, "__module__", "") == protocol.__module__
            if own and (name == "__call__" or not name.startswith("_")):
                found[name] = value
    return found


def _member(cls: type, name: str) -> Any:
    """A member of a class, as it stands there; a field counts. (Every class has a `__call__` of its own.)"""
    if name in getattr(cls, "__dataclass_fields__", {}):
        return name
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _parameters(function: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a method without `self` and annotations."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return inspect.Signature(bare[1:])


def _takes(function: Any, n: int) -> bool:
    """Whether a method can be called with so many arguments by position."""
    if not callable(function):
        return isinstance(function, staticmethod | classmethod)
    try:
        inspect.signature(function).bind(*[None] * (n + 1))
    except TypeError:
        return False
    return True
