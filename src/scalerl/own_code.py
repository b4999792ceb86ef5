"""Custom code: classes and functions of the user, named by module or file.

    my_package.losses:Topr     in a module that is installed, or in the working folder
    losses.py:Topr             in a file beside the recipe, or in the working folder
    topr                       an entry point of `scalerl.losses` in an installed package

A file is loaded as a submodule of this one whose name contains its path. Unpickling an object imports its
module, so every process finds it without help: spawned ones, ranks of torchrun, Ray actors, verifier workers.
While a file is loaded, its folder is on `sys.path`, so that it can import its neighbours.
"""

import importlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import quote, unquote

from scalerl.errors import InputError, in_one_line

__path__: list[str] = []  # makes this module a package, so that it can have submodules
_FILE = f"{__name__}."
_MAIN = ("__main__", "__mp_main__")
_loaded: dict[str, str] = {}  # the hash of each file when it was loaded
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
"""Installed packages announce their kinds as entry points of `scalerl.GROUP`."""


def is_own(cls: type) -> bool:
    """Whether a class is not part of this package."""
    # The module of a user's file has a name below this module's.
    return not cls.__module__.startswith("scalerl.") or cls.__module__.startswith(_FILE)


def check_picklable(value: object, name: str) -> None:
    """Raise an InputError that names the value by `name`, unless it can be sent to another process."""
    with in_one_line(f"{name} cannot go to another process"):
        pickle.dumps(value)


def check_main_guard() -> None:
    """Raise an InputError if a process started by a run is importing the script that started the run."""
    import multiprocessing

    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing checks this too
        how = 'call what trains below `if __name__ == "__main__":`'
        raise InputError(f"a process of a run imports this script: {how}")


def name_of(cls: type) -> str:
    """Return `module:Class`, or `path:Class` with an absolute path for a class of a user's file or script.

    Raises:
        InputError: the class was defined at a prompt or in a notebook, where other processes cannot find it.
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
    """Return a kind `file.py:Class` with the absolute path of its file; any other kind unchanged."""
    source, colon, name = kind.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if colon and source.endswith(".py") else kind


def beside(folder: Path, values: Any) -> Any:
    """Return the values of a file in `folder`, with absolute paths for the Python files that they name.

    A Python file is looked up in `folder`, then in the working folder; a name found in neither is kept.
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
    except OSError:  # the name is too long for a file
        return values
    return values if found is None else f"{found.resolve()}:{name}"


def label(kind: str) -> str:
    """Return the class name of a kind, for use in run names."""
    return kind.rpartition(":")[2]


def find(kind: str, group: Group) -> Any:
    """Return the object that `kind` names in a module, a file or an entry point; None for any other name.

    Raises:
        InputError: it cannot be loaded.
    """
    if ":" in kind:
        return load(kind)
    announced = entry_points(group=f"scalerl.{group}", name=kind)
    named = sorted({f"{entry.module}:{entry.attr}" for entry in announced})
    if len(named) > 1:
        raise InputError(
            f"{kind}: installed packages announce {' and '.join(named)} by it: name one of these"
        )
    return load(named[0]) if named else None


def load(name: str) -> Any:
    """Return the object that `module:name` or `file.py:name` names.

    Raises:
        InputError: it cannot be loaded.
    """
    source, _, inner = name.rpartition(":")
    with in_one_line(f"{name} cannot be loaded"):
        module = found = _module(source)
    for part in inner.split("."):
        if not part or not hasattr(found, part):
            # Names that the module imports, and private ones, are not suggested.
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
    """Return the file hash of every custom class and function named in the tables of a recipe, by name.

    For a module, it is the hash of its file if the module is loaded. Imports of a file are not in its hash.
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
        found[absolute(str(named))] = _hash(file)
    return found


def changed_files() -> list[str]:
    """Return the files of custom code that have changed since this process loaded them."""
    changed = []
    for file, code in _loaded.items():
        with suppress(OSError):  # gone or unreadable: the next process to load it raises
            changed += [file] * (_hash(file) != code)
    return changed


def loaded_files() -> dict[str, str]:
    """Return the hash of each file of custom code as this process loaded it."""
    return dict(_loaded)


def codes_in(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hashes of each custom kind in a run's config.json, one per version of its file."""
    found = config.get("code")
    return {
        name: [str(code) for code in codes]
        for name, codes in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(codes, list) and codes
    }


def _hash(file: str) -> str:
    return blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def _module(source: str) -> ModuleType:
    """Import a module by its name or its file."""
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            # Runs record absolute paths, and keep the hash of the code alone.
            advice = "; a run needs its code where it was: put it back there" * Path(source).is_absolute()
            raise FileNotFoundError(f"no file {path}{advice}")
        # Dots in a path would separate packages: quoted, the path is one module name, which `_Files` finds.
        return importlib.import_module(_FILE + quote(str(path), safe="/ ").replace(".", "%2E"))
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # as with `python -m`; processes inherit it
        # At its end, so that no file of the user shadows a package of the same name.
        sys.path.append(here)
    return importlib.import_module(source)


class _Files(MetaPathFinder):
    """Finds modules whose names contain the path of a file."""

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
        _loaded[self.path] = _hash(self.path)
        folder = str(Path(self.path).parent)
        # At its end, as in `_module`. Only once, as an import may load another file of the same folder.
        added = folder not in sys.path
        if added:
            sys.path.append(folder)
        try:
            super().exec_module(module)
        finally:
            if added and folder in sys.path:
                sys.path.remove(folder)


sys.meta_path.append(_Files())
