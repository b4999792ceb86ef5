"""The numbers in all columns of a table; those besides the pass rate are drawn below a page's chart."""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl.ingest.logs.log import finite_cell

_MOST = 2**20
"""Most numbers that are held, 16 bytes each; with more only every second row is kept, then every fourth."""


class Numbers:
    """The finite numbers of all columns of a table, by name, with the rows that they are in."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[array[int], array[float]]] = {}
        self._rows, self._every, self._held = 0, 1, 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of the next row of the file, whether it has a pass rate or not."""
        if self._rows % self._every == 0:
            for name, cell in row.items():
                if (number := finite_cell(cell)) == number:
                    rows, numbers = self._found.setdefault(name, (array("q"), array("d")))
                    rows.append(self._rows)
                    numbers.append(number)
                    self._held += 1
        self._rows += 1
        if self._held > _MOST:
            self._thin()

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns with numbers, over all rows that are held; NaN where a cell is not a number."""
        count = -(-self._rows // self._every)
        found = {}
        for name, (rows, numbers) in self._found.items():
            found[name] = np.full(count, np.nan)
            found[name][np.frombuffer(rows, dtype=np.int64) // self._every] = np.frombuffer(numbers)
        return found

    def _thin(self) -> None:
        self._every *= 2
        self._held = 0
        for name, (rows, numbers) in self._found.items():
            kept = [at for at, row in enumerate(rows) if row % self._every == 0]
            rows, numbers = array("q", [rows[at] for at in kept]), array("d", [numbers[at] for at in kept])
            self._found[name] = rows, numbers
            self._held += len(kept)
