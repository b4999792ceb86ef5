"""Packages that import their public names on first access, so that no command waits for names it ignores."""

import ast
import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that maps each of its public names to a module."""

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self._homes[name]), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule binds it to its package; `curve.fit` must stay the function.
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("_homes", {})):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def lazy(package: str) -> None:
    """Make the names in the `if TYPE_CHECKING:` block of `package` public, and import each on first access.

    In that block, `import Name as Name` marks the name as public for type checkers.
    """
    module = sys.modules[package]
    module.__class__ = _LazyPackage
    homes = {
        alias.name: imported.module
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If)
        for imported in block.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    module.__dict__.update(_homes=homes, __all__=sorted(homes))
