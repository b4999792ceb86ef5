"""Kinds: the dataclass that `kind` names in a table, a variant of the package or a custom one.

    cispo                      a variant of the package
    my_package.losses:Topr     a class of a module that is installed, or is in the working folder
    losses.py:Topr             a class of a file beside the recipe's, or in the working folder
    topr                       an entry point of `scalerl.losses` in an installed package

A file is a module below this one, under a name that contains its path. Unpickling an object imports its
module, so every process finds it without help: spawned ones, ranks of torchrun, Ray actors, verifier workers.
While a file is loaded, its folder is on the path of modules, so that it can import those beside it.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import quote, unquote

from scalerl.errors import InputError, brief, brief_error, nearest

__path__: list[str] = []  # makes this a package, which modules of files can be in
_FILE = f"{__name__}."
_MAIN = ("__main__", "__mp_main__")
_Mark = TypeVar("_Mark")
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
"""Packages announce their kinds as entry points of `scalerl.GROUP`."""


@dataclass(frozen=True)
class Choice:
    """Marks a field whose table is one of several dataclasses: `Annotated[Loss, Choice(...)]`."""

    group: Group
    protocol: type
    """The protocol that each class must satisfy."""
    built_in: Any
    """The variants of the package: a union of dataclasses, each with its name as the `Literal` of `kind`."""
    try_out: Callable[[Any], None] | None = None
    """Calls an object of a custom class once; raises an InputError where it does not do what it should."""
    each: bool = False
    """Whether the field maps names to such tables, in place of being one."""

    @property
    def variants(self) -> dict[str, type]:
        """The variants of the package by their kinds."""
        return {get_args(get_type_hints(one)["kind"])[0]: one for one in get_args(self.built_in)}

    def own(self, kind: Any) -> type | None:
        """Return the custom class that a `kind` names, checked; None for a variant of the package or no name.

        Raises:
            InputError: there is no such kind, it cannot be loaded, or does not satisfy the protocol.
        """
        if not isinstance(kind, str) or kind in self.variants:
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
        announced = [entry.name for entry in entry_points(group=f"scalerl.{self.group}")]
        return [*self.variants, *sorted(announced)]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return a schema that validates tables of the package's variants and passes dataclass objects."""
        from typing import Annotated

        from pydantic import Discriminator
        from pydantic_core import core_schema

        def validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
            # Custom classes were made and checked before: pydantic knows the variants of the package alone.
            return value if is_dataclass(value) else built_in(value)

        variants = handler(Annotated[self.built_in, Discriminator("kind")])
        one = core_schema.no_info_wrap_validator_function(validate, variants)
        return core_schema.dict_schema(core_schema.str_schema(), one) if self.each else one


@dataclass(frozen=True)
class InFiles:
    """Marks a field that also takes objects in Python: `Annotated[str | Recipe, InFiles(str)]`."""

    hint: Any
    """The type of what a file has for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of what is in files, which are all that is validated."""
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
    """Return the types of a dataclass's fields in files; that of a choice is the union of its variants."""
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
    """Return what a recipe is changed by, with a table for every dataclass in it, of its values and its kind.

    Raises:
        InputError: a value of a dataclass cannot be written to a file.
    """
    if is_dataclass(value):
        has_kind = _is_own(type(value)) or hasattr(value, "kind")
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
    """Return the kind of an object: the `kind` of a variant of the package, else the name of its class."""
    cls = type(value)
    return name_of(cls) if _is_own(cls) else value.kind


def _is_own(cls: type) -> bool:
    # A file's module is below this one by name, and is not of the package.
    return not cls.__module__.startswith("scalerl.") or cls.__module__.startswith(_FILE)


def name_of(cls: type) -> str:
    """Return `module:Class`, or `path:Class` with the absolute path for a class of a file or of the program.

    Raises:
        InputError: the class was defined at a prompt or in a notebook, where no other process finds it.
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
    """Return the kind of a file with its absolute path; any other unchanged."""
    source, colon, name = kind.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if colon and source.endswith(".py") else kind


def beside(folder: Path, values: Any) -> Any:
    """Return the values of a file in `folder`, where the Python files that they name have absolute paths.

    A file is that in the folder, or else in the working folder; where there is neither, its name is kept.
    """
    if isinstance(values, Mapping):
        return {key: beside(folder, value) for key, value in values.items()}
    if isinstance(values, list):
        return [beside(folder, value) for value in values]
    source, colon, name = values.rpartition(":") if isinstance(values, str) else ("", "", "")
    if not colon or not source.endswith(".py"):
        return values
    try:
        found = next((path for path in (folder / source, Path(source)) if path.is_file()), None)
    except OSError:  # of a name that is too long for a file
        return values
    return values if found is None else f"{found.resolve()}:{name}"


def label(kind: str) -> str:
    """Return the name of the class, for names of runs."""
    return kind.rpartition(":")[2]


def find(kind: str, group: Group) -> Any:
    """Return the object that a `kind` names in a module, a file or an entry point; None for other names.

    Raises:
        InputError: it cannot be loaded.
    """
    if ":" in kind:
        return load(kind)
    for entry in entry_points(group=f"scalerl.{group}", name=kind):
        return load(entry.value)
    return None


def load(name: str) -> Any:
    """Return the object that `module:name` or `file.py:name` names.

    Raises:
        InputError: it cannot be loaded.
    """
    source, _, inner = name.rpartition(":")
    try:
        module = found = _module(source)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is loaded
        raise InputError(f"{name} cannot be loaded ({brief_error(error)})") from error
    for part in inner.split("."):
        if not part or not hasattr(found, part):
            # What it imports is not meant, nor is what it keeps to itself.
            own = [
                name
                for name, value in vars(module).items()
                if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
            ]
            wrong = f"{source} has no {inner}" if inner else f"{name} names nothing after the colon"
            raise InputError(
                wrong + f"; {source if not inner else 'it'} has {', '.join(own[:12])}" * bool(own)
            )
        found = getattr(found, part)
    return found


def code_of(values: Any) -> dict[str, str]:
    """Return a hash of the file of every custom class and function in the tables of a recipe, by its name.

    Of a module it is that of its own file, once it is loaded; what the file imports is not in the hash.
    """
    if isinstance(values, list | tuple):
        return {name: code for one in values for name, code in code_of(one).items()}
    if not isinstance(values, Mapping):
        return {}
    found = {name: code for one in values.values() for name, code in code_of(one).items()}
    kind = values.get("kind")
    key = {"function": "name", "env": "environment"}.get(str(kind), "kind")
    named = values.get(key)
    source = named.rpartition(":")[0] if isinstance(named, str) else ""
    file = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
    if file is not None and Path(file).is_file():
        found[absolute(str(named))] = blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    return found


def codes_in(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hashes of custom kinds in a run's config.json: one for each change of a file."""
    found = config.get("code")
    return {
        name: [str(code) for code in codes]
        for name, codes in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(codes, list) and codes
    }


def _module(source: str) -> ModuleType:
    """Import a module by its name or its file."""
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        # The dots of a path would be packages: quoted, a file is one module, found by `_Files`.
        return importlib.import_module(_FILE + quote(str(path), safe="/ ").replace(".", "%2E"))
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # as with `python -m`; processes inherit it
        # At its end: a file of the user's must not shadow a package of the same name.
        sys.path.append(here)
    return importlib.import_module(source)


class _Files(MetaPathFinder):
    """Finds the modules whose names contain the path of a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if not fullname.startswith(_FILE):
            return None
        file = unquote(fullname.removeprefix(_FILE))
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


class _Loader(SourceFileLoader):
    """Loads a file, which can import modules beside it."""

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        folder = str(Path(self.path).parent)
        # At its end, as in `_module`; and only once: an import in it may load another file of the folder.
        added = folder not in sys.path
        if added:
            sys.path.append(folder)
        try:
            super().exec_module(module)
        finally:
            if added and folder in sys.path:
                sys.path.remove(folder)


sys.meta_path.append(_Files())


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
    """Return the arguments of a method without `self` and annotations."""
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
