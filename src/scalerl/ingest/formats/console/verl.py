"""verl's rows: `step:1 - actor/entropy:0.3 - ...`.

From verl 0.1 to 0.9.1: verl/utils/logger/aggregate_logger.py (`concat_dict_to_str`: three decimals up to 0.4,
all digits since), verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py.
"""

import re
from collections.abc import Sequence

from scalerl import limits
from scalerl.ingest.formats.console.lines import NUMBER, ConsoleForm, ConsoleLine, ConsoleRow


class VerlRows(ConsoleForm):
    """All rows of verl's; its steps are numbers of updates before the evaluation in them.

    Up to January 2025 (before 0.2) the first update had the step 0, and its evaluation came after the update:
    rows of these versions, which call timings `timing/...` and not `timing_s/...`, get a step more.
    """

    _start = re.compile(r"(?:^|[\s)\]])step:(\d{1,15}) - (?=\S+:)")
    _cell = re.compile(
        rf"(?P<name>\S.{{0,500}}?):\s{{0,9}}(?:[\w.]{{1,40}}\()?(?P<number>{NUMBER})\)?\s{{0,9}}"
    )
    """A number as it is, or as NumPy 2 shows its own."""
    _torn = re.compile(r"(?P<name>[^\s:]{1,500}):.{0,100}")

    def __init__(self) -> None:
        self._counts_from_0 = False

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return its row."""
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
        is_validation = all(name.startswith(("test_score/", "val/", "val-")) for name in values)
        step = float(found[1]) + (self._counts_from_0 and not is_validation)
        # Up to 0.2 the first validation lacks the `val/` that all others have.
        values = {f"val/{k}" if k.startswith("test_score/") else k: value for k, value in values.items()}
        return (ConsoleRow("verl", step, values, line, is_closed=False),)
