"""Values that pass between sandboxes: data of builtin types, as lines of JSON.

    null, true, 1, 1.5, "text", [1, 2]     as they are: None, bool, int, float, str, list
    {"tuple": [1, 2]}, {"dict": [[k, v]]}  everything else, under the name of its type

Decoded values are of exactly these types, whatever the other side sent, so they cannot bring methods along.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

MAX_LINE = 16 << 20
"""The most bytes of one message."""
_DEPTH = 100
_LONG = 1 << 4096  # longer integers take quadratic time in decimal, and Python refuses to parse them

_ITEMS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
}
_NAMES = {kind: kind.__name__ for kind in (tuple, set, frozenset, dict, Counter, OrderedDict)}
_NAMES |= {defaultdict: "dict"}


class NotPlainError(Exception):
    """A value is of a type that cannot be sent, or nested too deeply."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value in a form that `json.dumps` accepts.

    Raises:
        NotPlainError: it contains a type that this module does not support, or is nested too deeply.
    """
    kind = type(value)
    if depth > _DEPTH:
        raise NotPlainError("a value that is nested too deeply")
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_LONG < value < _LONG else {"int": hex(value)}
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [encode(part, depth + 1) for part in (value.start, value.stop, value.step)]}
    name = _NAMES.get(kind)
    if name in _ITEMS:
        return {name: [encode(item, depth + 1) for item in value]}
    if name in _PAIRS:
        return {name: [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    raise NotPlainError(f"a value of type {kind.__name__}")


def decode(value: Any) -> Any:
    """Return the value that `encode` turned into `value`.

    Raises:
        ValueError, TypeError, OverflowError: `encode` cannot have returned `value`.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "int":
        return int(inner, 16)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        real, imaginary = inner
        return complex(float(real), float(imaginary))
    if name == "range":
        return range(*decode(inner))
    if name in _ITEMS:
        return _ITEMS[name]([decode(item) for item in inner])
    if name in _PAIRS:
        return _PAIRS[name]([(decode(key), decode(item)) for key, item in inner])
    raise ValueError("no such type")


def dumps(message: dict[str, Any]) -> bytes:
    """Return a message of encoded values as a line."""
    return json.dumps(message).encode() + b"\n"


def loads(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        ValueError, RecursionError: it is not a message.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message
