"""Tests of a data set, evaluated in a sandbox; the tested code runs in another one.

    this process                    candidate.py
    assert f([1, 2]) == 3   -- {"name": "f", "args": [[1, 2]]} -->   f of the completion
                            <-- {"value": 3} ---------------------

Names that the code defines are proxies here: a call sends plain data and returns plain data. No object of the
code reaches this process, so none can compare equal to everything, and no expected answer reaches the code.
"""

import ast
import builtins
import os
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from scalerl.rl.sandbox.plain import MAX_LINE, NotPlainError, decode, dumps, encode, loads

_OF_CODE = "_of_the_code"  # marks an exception that the code raised
_WITHOUT = (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "next", "contains", "getitem"),
    *("setitem", "delitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "mod", "neg", "int"),
    *("float", "index", "enter", "exit", "await", "str", "repr", "format"),
)


class _UnsupportedError(BaseException):
    """A test needs something that a proxy cannot do; `except Exception` in a test does not catch this."""


class _CandidateError(Exception):
    """The code raised an exception that is not builtin."""


class _Channel:
    """Calls to the code, and the faults that they have shown."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, os.fdopen(replies, "rb")
        self.unsupported: str | None = None
        self.mutated: str | None = None
        """A call that changed an argument to which the test still has a reference."""
        self.broken = False
        """Whether the process of the code ended, or sent an invalid reply; a test may catch the exception."""

    def fail(self, why: str) -> NoReturn:
        """Record that a test is not supported, and leave it."""
        self.unsupported = self.unsupported or why
        raise _UnsupportedError(why)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], held: bool) -> Any:
        try:
            request = {"args": [encode(a) for a in args], "kwargs": {k: encode(v) for k, v in kwargs.items()}}
        except NotPlainError as error:
            self.fail(f"{name} is called with {error}")
        try:
            reply = self._exchange(dumps({"name": name, **request}))
            raised = _exception(*reply["raised"]) if "raised" in reply else None
            value = None if raised or "unsupported" in reply else decode(reply["value"])
        except Exception:
            self.broken = True
            raise
        if reply.get("mutated") is True and held:
            self.mutated = self.mutated or f"{name} changes its arguments in place"
        if "unsupported" in reply:
            self.fail(str(reply["unsupported"])[:300])
        if raised:
            raise raised
        return value

    def _exchange(self, data: bytes) -> dict[str, Any]:
        while data:
            data = data[os.write(self._requests, data) :]
        line = self._replies.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise RuntimeError("the process of the code ended")
        return loads(line)


class _Proxy:
    """A name of the code, which can be called, and nothing else."""

    def __init__(self, channel: _Channel, name: str) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A literal in the call has exactly this many references. If there are more, a variable of the test
        # holds the value, and the test may look there for what the code has changed in place.
        held = any(sys.getrefcount(value) > _REFERENCES for value in args if isinstance(value, _MUTABLE))
        return self._channel.call(self._name, args, kwargs, held or bool(kwargs))

    def __getattr__(self, attribute: str) -> Any:
        self._channel.fail(f"the test uses {self._name}.{attribute}")

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._channel.fail(f"the test sets {self._name}.{attribute}")


class _Count:
    """Stands for a proxy in `_REFERENCES`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(sys.getrefcount(value) for value in args if isinstance(value, _MUTABLE))


_MUTABLE = list | dict | set
_REFERENCES = _Count()([])
"""Number of references to a list literal in a call."""


def _refuse(self: Any, *args: Any) -> Any:
    self._channel.fail(f"the test uses {self._name} other than by a call")


for _operation in _WITHOUT:
    setattr(_Proxy, f"__{_operation}__", _refuse)


def judge(
    tests: Sequence[str],
    setup: str,
    reference: str,
    entry_point: str,
    requests: int,
    replies: int,
    verdict: int,
) -> None:
    """Evaluate `tests` after `setup`, and write the verdict: `passed`, `failed` or `unsupported`, and why.

    Names that are not defined here refer to the code, and so do names that `reference` defines, whose imports
    are executed. With an `entry_point`, the tests define `check`, which is called with it.
    """
    channel = _Channel(requests, replies)
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    try:
        _define(module.__dict__, channel, [setup, *tests], reference)
        _run(module, setup, "setup.py")
        if entry_point:
            module.__dict__[entry_point] = _Proxy(channel, entry_point)
        for test in tests:
            _run(module, test, "test.py")
        if entry_point:
            module.__dict__["check"](module.__dict__[entry_point])
        found, why = "passed", ""
    except BaseException as error:
        found, why = "failed", f"{type(error).__name__}: {str(error)[:300]}"
        if isinstance(error, ImportError) and not hasattr(error, _OF_CODE):
            channel.unsupported = f"its tests need what the Python of the sandbox lacks: {error}"
        channel.unsupported = channel.unsupported or channel.mutated
    if channel.broken:
        found, why = "failed", "the process of the code ended, or sent what is no reply"
    elif channel.unsupported:
        found, why = "unsupported", channel.unsupported
    os.write(verdict, dumps({"verdict": found, "why": why}))
    os._exit(0)


def _run(module: types.ModuleType, source: str, name: str) -> None:
    exec(compile(source, name, "exec"), module.__dict__)


def _define(names: dict[str, Any], channel: _Channel, sources: Sequence[str], reference: str) -> None:
    """Define proxies for names of the code that the sources use, and make the imports of the reference."""
    body = ast.parse(reference).body
    imports: list[ast.stmt] = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "reference.py", "exec"), names)
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and (node.id in defined or not hasattr(builtins, node.id)):
                names.setdefault(node.id, _Proxy(channel, node.id))


def _exception(name: str, text: str) -> Exception:
    """Return the exception of the code: a builtin one, or a `_CandidateError` for any other."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        error = kind(str(text))
        setattr(error, _OF_CODE, True)
        return error
    return _CandidateError(f"{name}: {text}")
