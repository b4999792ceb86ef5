"""Work that was begun, perhaps elsewhere, and is waited for while other things are done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")
_Result = TypeVar("_Result", covariant=True)


class Pending(Protocol[_Result]):
    """Both methods raise what the work raised."""

    def wait(self, seconds: float) -> bool:
        """Whether it is done; waits for that, and for no longer than `seconds`."""
        ...

    def result(self) -> _Result:
        """What came of it, once it is done."""
        ...


@dataclass(frozen=True)
class Done(Generic[_T]):
    """Work that was done as it was begun."""

    value: _T

    def wait(self, seconds: float) -> bool:
        """It is done."""
        return True

    def result(self) -> _T:
        """What came of it."""
        return self.value
