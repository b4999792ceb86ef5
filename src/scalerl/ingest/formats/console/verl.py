"""verl's rows: `step:1 - actor/entropy:0.3 - ...`, and the first validation of its trainers.

From verl 0.1 to 0.9.1: verl/utils/logger/aggregate_logger.py (`concat_dict_to_str`: three decimals up to 0.4,
all digits since), verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from scalerl import limits
from scalerl.ingest.formats.console.dicts import literal, parse_dict
from scalerl.ingest.formats.console.lines import NUMBER, ConsoleForm, ConsoleLine, ConsoleRow

_LONGEST = 2**18
"""Characters of the first validation."""
_ROUNDED = 0.0005
"""How far three decimals are off."""


class VerlRows(ConsoleForm):
    """All rows of verl's; its steps are numbers of updates before the evaluation in them.

    Up to January 2025 (before 0.2) the first update had the step 0, and its evaluation came after the update:
    rows of these versions, which call timings `timing/...` and not `timing_s/...`, get a step more.

    `Initial validation metrics: {...}` has no step. All but the first versions log the same values as a row
    next, be it of step 0 or of the one that is resumed from, there with fewer digits.
    """

    _start = re.compile(r"(?:^|[\s)\]])step:(\d{1,15}) - (?=\S+:)")
    _cell = re.compile(
        rf"(?P<name>\S.{{0,500}}?):\s{{0,9}}(?:[\w.]{{1,40}}\()?(?P<number>{NUMBER})\)?\s{{0,9}}"
    )
    """A number as it is, or as NumPy 2 shows its own."""
    _torn = re.compile(r"(?P<name>[^\s:]{1,500}):.{0,100}")
    _initial = re.compile(r"[(\"']{1,2}Initial validation metrics: ")
    _next = re.compile(r"\s{0,3}['\"]")

    def __init__(self) -> None:
        self._opened: tuple[ConsoleLine, list[str]] | None = None
        self._first: tuple[ConsoleLine, dict[str, object]] | None = None
        self._counts_from_0 = False

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return the rows that it ends."""
        if self._opened is not None and line.process == self._opened[0].process:
            if self._next.match(line.text):
                return self._go_on(line)
            torn, self._opened = self._opened[0], None
            return (ConsoleRow("verl", 0.0, None, torn), *self.take(line))
        if "Initial validation" in line.text and (found := self._initial.search(line.text)):
            self._opened = line, []
            return self._go_on(line, found.start())
        if "step:" not in line.text or (found := self._start.search(line.text)) is None:
            return ()
        text = line.text[found.end() :]
        # Counted before the split: a line of 16 MB of separators would become millions of texts.
        limits.KEYS.check(text.count(" - ") + 1, line.where)
        # The expression tries every colon as the end of the name, so that what is no metric costs it most.
        cells = text.split(" - ")
        matches = [self._cell.fullmatch(cell) if len(cell) < 1000 else None for cell in cells]
        values: dict[str, object] = {cell["name"]: float(cell["number"]) for cell in matches if cell}
        if values:  # verl prints numbers alone: another cell is damaged, and counts as an evaluation left out
            torn = (self._torn.match(cell) for cell, match in zip(cells, matches, strict=True) if not match)
            values |= {cell["name"]: cell[0] for cell in torn if cell and cell["name"] not in values}
        names = [name.partition("/")[0] for name in values]
        if older := names.count("timing") - names.count("timing_s") - names.count("timing(s)"):
            self._counts_from_0 = older > 0
        step = float(found[1]) + (self._counts_from_0 and not _is_validation(values))
        return self._after_first(ConsoleRow("verl", step, _renamed(values), line, is_closed=False))

    def end(self) -> Sequence[ConsoleRow]:
        """Return the first validation, if no row came after it."""
        if self._opened is not None:
            return (ConsoleRow("verl", 0.0, None, self._opened[0], is_closed=False),)
        return () if self._first is None else (ConsoleRow("verl", 0.0, self._first[1], self._first[0]),)

    def _go_on(self, line: ConsoleLine, start: int = 0) -> Sequence[ConsoleRow]:
        """Add a line to the first validation: pprint prints a long text as literals, one a line, in ()."""
        assert self._opened is not None
        first, texts = self._opened
        texts.append(line.text[start : start + _LONGEST].strip())
        is_longer = sum(map(len, texts)) >= _LONGEST
        if texts[0].startswith("(") and not texts[-1].endswith(")") and not is_longer:
            return ()
        self._opened = None
        text = None if is_longer else literal("\n".join(texts))
        values = parse_dict(text.partition(": ")[2], first.where) if isinstance(text, str) else None
        if values is None:
            return (ConsoleRow("verl", 0.0, None, first, is_closed=line.whole),)
        self._first = first, _renamed(values)
        return ()

    def _after_first(self, row: ConsoleRow) -> Sequence[ConsoleRow]:
        """Give a row the digits of the first validation, or put that before it."""
        if self._first is None or row.values is None:
            return (row,)
        line, first = self._first
        self._first = None
        if not (row.values.keys() & first.keys() and _is_validation(row.values)):
            # The versions that count from 0 do not resume.
            before = 0.0 if self._counts_from_0 else max(row.step - 1, 0.0)
            return (ConsoleRow("verl", before, first, line), row)
        both = {
            **row.values,
            **{name: first[name] for name in row.values if _rounds(first, name, row.values)},
        }
        return (ConsoleRow("verl", row.step, both, row.line, row.is_closed),)


def _is_validation(values: Mapping[str, object]) -> bool:
    """Whether a row has been logged without a step of training."""
    return all(name.startswith(("test_score/", "val/", "val-")) for name in values)


def _rounds(exact: Mapping[str, object], name: str, rounded: Mapping[str, object]) -> bool:
    """Whether a value is another one to three decimals."""
    a, b = exact.get(name), rounded[name]
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= _ROUNDED * (1 + 1e-9)


def _renamed(values: Mapping[str, object]) -> dict[str, object]:
    """Put `val/` before the scores of the first validation, as before those of all others, up to 0.2."""
    return {f"val/{k}" if k.startswith("test_score/") else k: value for k, value in values.items()}
