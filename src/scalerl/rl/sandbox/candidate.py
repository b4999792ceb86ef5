"""The code of a completion in a sandbox of its own; tests in another sandbox call its functions by name.

{"name": "f", "args": [...], "kwargs": {...}} -->     <-- {"value": ...}, {"raised": [type, text]} or
{"unsupported": why}; with "mutated": true if an argument was changed in place
"""

import os
import sys
import types
from typing import Any

from scalerl.rl.sandbox.plain import NotPlainError, decode, dumps, encode, loads


def serve(source: str, requests: int, replies: int) -> None:
    """Run `source` as a module, then answer the calls that come over a pipe until it is closed."""
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        exec(compile(source, "candidate.py", "exec"), module.__dict__)
        failed = None
    except BaseException as error:  # even sys.exit is reported as an exception of the first call
        failed = error
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            reply = _raised(failed) if failed else _call(module, loads(line))
            data = dumps(reply)
            while data:
                data = data[os.write(replies, data) :]


def _call(module: types.ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    before = [request["args"], request["kwargs"]]
    args = [decode(value) for value in request["args"]]
    kwargs = {name: decode(value) for name, value in request["kwargs"].items()}
    try:
        function = module.__dict__[request["name"]]
    except KeyError as error:
        return _raised(NameError(f"name {error} is not defined"))
    try:
        reply = {"value": encode(function(*args, **kwargs))}
    except NotPlainError as error:
        reply = {"unsupported": f"{request['name']} returned {error}"}
    except BaseException as error:
        reply = _raised(error)
    try:
        after = [[encode(value) for value in args], {name: encode(value) for name, value in kwargs.items()}]
    except NotPlainError:
        after = None
    return reply | {"mutated": after != before}


def _raised(error: BaseException) -> dict[str, Any]:
    return {"raised": [type(error).__name__, str(error)[:1000]]}
