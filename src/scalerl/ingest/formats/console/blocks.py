"""Rows that are lines and panels with a form of their own: of verl, NeMo RL, prime-rl and open-instruct.

All but verl print only some of the metrics that they log to trackers; these get the names they have there.
"""

import math
import re
from collections.abc import Mapping, Sequence

from scalerl import limits
from scalerl.ingest.formats.console.dicts import parse_dict
from scalerl.ingest.formats.console.lines import MOST_PROCESSES, NUMBER, ConsoleForm, ConsoleLine, ConsoleRow

_LONGEST = 500
"""Most lines of a panel."""
_COLUMNS = 50
"""Columns of a line that are examined; there are up to 12."""
_OF_NEMO_RL = {
    ("Validation", "Accuracy"): "validation/accuracy",
    ("Validation", "Average response length"): "validation/avg_length",
    ("Validation", "Total validation time"): "timing/validation/total_validation_time",
    ("Training", "Loss"): "train/loss",
    ("Training", "Avg Reward"): "train/reward",
    ("Training", "Avg Total Reward"): "train/reward",
    ("Training", "Generation KL Error"): "train/gen_kl_error",
    ("Training", "Mean Generation Length"): "train/mean_gen_tokens_per_sample",
    ("Training", "Total step time"): "timing/train/total_step_time",
}
_OF_TRAINING = {
    "Reward": "train/agg/effective/console/reward/mean",
    "Truncation": "train/agg/effective/console/is_truncated/mean",
    "Loss": "loss/mean",
    "Entropy": "entropy/all/mean",
    "Mismatch KL": "mismatch_kl/all/mean",
    "Grad. Norm": "optim/grad_norm",
    "LR": "optim/lr",
}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_OF_EVALUATION = {"Reward": "reward/mean", "Truncation": "is_truncated/mean"}


class VerlRows(ConsoleForm):
    """`step:1 - actor/entropy:0.3 - ...`: the step is the number of updates before the evaluation in its row.

    From verl 0.1 to 0.9.1: verl/utils/logger/aggregate_logger.py (`concat_dict_to_str`: three decimals up to
    0.4, all digits since), verl/trainer/ppo/ray_trainer.py, verl/trainer/ppo/v1/trainer_base.py.
    Up to January 2025 (before 0.2) the first update had the step 0, and its evaluation came after the update:
    rows of these versions, which call timings `timing/...` and not `timing_s/...`, get one step more. Some of
    them print the evaluation before training only in words, `Initial validation metrics: {...}`.
    """

    _start = re.compile(r"(?:^|[\s)\]])step:(\d{1,15}) - (?=\S+:)")
    _cell = re.compile(
        rf"(?P<name>\S.{{0,500}}?):\s{{0,9}}(?:[\w.]{{1,40}}\()?(?P<number>{NUMBER})\)?\s{{0,9}}"
    )
    """A number as it is, or as NumPy 2 prints its own."""
    _torn = re.compile(r"(?P<name>[^\s:]{1,500}):.{0,100}")
    _initial = re.compile(r"Initial validation metrics: (?=\{)")

    def __init__(self) -> None:
        self._counts_from_0 = False
        self._before: ConsoleRow | None = None
        """The evaluation before training, until a row shows whether it is printed as a row, too."""

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return its row, after that of the evaluation before training."""
        if "Initial validation" in line.text and (start := self._initial.search(line.text)):
            first = parse_dict(line.text[start.end() :], line.where)
            self._before = ConsoleRow("verl", 0.0, self._named(first), line) if first else None
        if "step:" not in line.text or (found := self._start.search(line.text)) is None:
            return ()
        text = line.text[found.end() :]
        # Counted before the split: a line of 16 MB of separators would become millions of texts.
        limits.KEYS.check(text.count(" - ") + 1, line.where)
        # The expression tries every colon as the end of the name: text that is no metric costs it most.
        cells = text.split(" - ")
        matches = [self._cell.fullmatch(cell) if len(cell) < 1000 else None for cell in cells]
        values: dict[str, object] = {cell["name"]: float(cell["number"]) for cell in matches if cell}
        if values:  # verl prints only numbers: another cell is damaged, and counts as an evaluation left out
            torn = (self._torn.match(cell) for cell, match in zip(cells, matches, strict=True) if not match)
            values |= {cell["name"]: cell[0] for cell in torn if cell and cell["name"] not in values}
        names = [name.partition("/")[0] for name in values]
        if older := names.count("timing") - names.count("timing_s") - names.count("timing(s)"):
            self._counts_from_0 = older > 0
        is_validation = all(name.startswith(("test_score/", "val/", "val-")) for name in values)
        step = float(found[1]) + (self._counts_from_0 and not is_validation)
        row = ConsoleRow("verl", step, self._named(values), line, is_closed=False)
        before, self._before = self._before, None
        # A resumed run is evaluated before it continues, too: its first row is not that of step 0.
        return (before, row) if before and found[1] == "0" and not is_validation else (row,)

    @staticmethod
    def _named(values: Mapping[str, object]) -> dict[str, object]:
        """Return the values by name; up to 0.2 the first validation lacks the prefix `val/` of all others."""
        return {f"val/{k}" if k.startswith("test_score/") else k: value for k, value in values.items()}


class NemoRLRows(ConsoleForm):
    """`Step 1/100`, then `Training Results:` and `Validation Results:` with lines as `• Accuracy: 0.4`.

    From NeMo RL 0.3 to the main branch of August 2026: nemo_rl/algorithms/grpo.py, grpo_sync.py, ppo.py.
    The step in its headings is counted within the epoch; the step of a validation is that of the run.
    """

    _epoch_of = re.compile(r"={5,} Epoch (\d{1,9})/")
    _step_of = re.compile(r"={5,} Step (\d{1,15})/(\d{1,15}) ={5,}")
    _validation_of = re.compile(r"Starting validation at step (\d{1,15})\.\.\.")
    _item = re.compile(
        rf"\s*(?:•|⏱️) {{1,4}}(?P<what>[\w /-]{{1,60}}): (?P<number>{NUMBER})(?:s|\stokens)?\s*"
    )

    def __init__(self) -> None:
        self._epoch, self._in_epoch = 1, 0
        self._before_epoch: int | None = 0
        """Steps of all epochs before, if known."""
        self._step = self._trained = self._validated = math.nan
        self._block = ""

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return its row."""
        text = line.text
        if self._block and (item := self._item.fullmatch(text)):
            name = _OF_NEMO_RL.get((self._block, item["what"]))
            step = self._validated if self._block == "Validation" else self._trained
            values = {name: float(item["number"])} if name else {}
            is_row = name and not math.isnan(step)
            return (ConsoleRow("nemo-rl", step, values, line, is_closed=False),) if is_row else ()
        if "= Epoch " in text and (found := self._epoch_of.search(text)):
            self._begin_epoch(int(found[1]))
        elif "= Step " in text and (found := self._step_of.search(text)):
            self._begin_step(int(found[1]), int(found[2]))
        elif "Starting validation" in text and (found := self._validation_of.search(text)):
            self._validated, self._block = float(found[1]), ""
            if self._in_epoch and found[1] != "0":
                self._before_epoch, self._step = int(found[1]) - self._in_epoch, self._validated
        elif "Validation Results" in text:
            self._block = "Validation"
        elif "Training Results" in text:
            # Each step has one block: a further one belongs to a step whose heading is damaged.
            self._block, self._trained = "Training", self._step
            self._step = self._validated = math.nan
        return ()

    def _begin_epoch(self, epoch: int) -> None:
        if epoch == self._epoch + 1 and self._in_epoch and self._before_epoch is not None:
            self._before_epoch += self._in_epoch
        else:
            self._before_epoch = None if epoch > 1 else 0
        self._epoch, self._in_epoch = epoch, 0

    def _begin_step(self, step: int, steps_of_epoch: int) -> None:
        if self._before_epoch is None:  # the console begins here, or begins again
            self._before_epoch = (self._epoch - 1) * steps_of_epoch
        self._in_epoch, self._block, self._validated = step, "", math.nan
        self._step = float(self._before_epoch + step)


class PrimeRLRows(ConsoleForm):
    """`Step 1 | 2.5s | Reward 0.4 | ...` and `Evaluated aime (Step 1) | Policy v1 | Reward 0.4 | ...`.

    From prime-rl 0.6 to the main branch of August 2026: src/prime_rl/orchestrator/orchestrator.py and
    src/prime_rl/trainer/rl/train.py. In 0.3 to 0.5 there are colons, and evaluations as `Evaluated aime in
    9.5s (Avg@4=0.4, ...`, of the weights that the line `Running evals for checkpoint step 1` names.
    """

    _start = re.compile(
        r"\b(?:Evaluated (?P<env>\S{1,200}) \(Step (?P<evaluated>\d{1,15})\)|Step (?P<step>\d{1,15})) \| "
    )
    _column = re.compile(rf"(?P<what>[A-Z][\w. -]{{0,40}}?):? (?P<number>{NUMBER})(?P<percent>%)?(?:s|\s.*)?")
    _time = re.compile(r"(?:Time: )?((?:\d{1,9}(?:\.\d{1,9})?(?:ms|[dhms]) ?){1,4})")
    _running = re.compile(r"Running evals for (?:checkpoint|interval) step (\d{1,15})\b")
    _older = re.compile(
        rf"Evaluated (?:\S{{1,300}} on )?(?P<env>\S{{1,200}}) in [\d.]{{1,20}}s "
        rf"\((?P<metric>Avg@\d{{1,6}})=(?P<number>{NUMBER})[,)]"
    )

    def __init__(self) -> None:
        self._running_step = math.nan

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return its row."""
        text = line.text
        if "Running evals" in text and (running := self._running.search(text)):
            self._running_step = float(running[1])
            return ()
        if "(Avg@" in text and (older := self._older.search(text)):
            values = {f"eval/{older['env']}/{older['metric'].lower()}": float(older["number"])}
            row = ConsoleRow("prime-rl", self._running_step, values, line)
            return () if math.isnan(row.step) else (row,)
        if " | " not in text or (found := self._start.search(text)) is None:
            return ()
        values = {}
        columns = text[found.end() :].split(" | ", _COLUMNS)[:_COLUMNS]
        columns = [column.strip() for column in columns if len(column) < 200]
        if columns and found["step"] and (time := self._time.fullmatch(columns[0])):
            values["time/step"] = _seconds(time[1])
        for column in columns:
            if (cell := self._column.fullmatch(column)) is None:
                continue
            name = (_OF_EVALUATION if found["env"] else _OF_TRAINING).get(cell["what"])
            if name:
                name = f"eval/{found['env']}/effective/console/{name}" if found["env"] else name
                values[name] = float(cell["number"]) / (100 if cell["percent"] else 1)
        step = float(found["evaluated"] or found["step"])
        return (ConsoleRow("prime-rl", step, values, line, is_closed=False),) if values else ()


def _seconds(time: str) -> float:
    """Return the seconds in a text such as 850ms, 9.5s, 1m 5s or 2h 3m."""
    parts = re.findall(r"([\d.]+)(ms|[dhms])", time)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


class OpenInstructRows(ConsoleForm):
    """A panel titled Metrics: a category, and `name: 0.42 | name: 3` beside it, with two decimals.

    From open-instruct 0.2 to the main branch of August 2026: `print_rich_single_line_metrics` in
    open_instruct/model_utils.py, for grpo_fast.py. The panel of an evaluation has no step: its step is that
    of the training panel before it, at which grpo_fast.py logs it.
    """

    _top = re.compile(r"╭─+ Metrics ─+╮")
    _cell = re.compile(rf"(?P<name>\S.{{0,200}}?): (?P<number>{NUMBER})")

    def __init__(self) -> None:
        self._panels: dict[str, tuple[ConsoleLine, list[str]]] = {}
        self._step = math.nan

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return the row that ends with it."""
        text = line.text.strip()
        if text.startswith("╭") and self._top.match(text):
            if len(self._panels) < MOST_PROCESSES:
                self._panels[line.process] = (line, [])
        elif line.process in self._panels and text.startswith(("│", "╰")):
            first, inside = self._panels[line.process]
            if text.startswith("│") and len(inside) < _LONGEST and len(text) < 1000:
                inside.append(text.strip("│"))
                return ()
            del self._panels[line.process]
            return self._rows(first, inside) if text.startswith("╰") else ()
        elif "training_step:" in text:  # in a panel without its top
            self._step = math.nan
        return ()

    def end(self) -> Sequence[ConsoleRow]:
        """Return the unfinished panels."""
        return tuple(
            ConsoleRow("open-instruct", math.nan, None, line, is_closed=False)
            for line, _ in self._panels.values()
        )

    def _rows(self, line: ConsoleLine, inside: Sequence[str]) -> Sequence[ConsoleRow]:
        texts: dict[str, str] = {}
        category = ""
        for one in inside:
            words = one.split(maxsplit=1)
            if words and not one.startswith("   "):  # the column of categories is not empty
                category = words[0]
                one = words[1] if len(words) > 1 else ""
            texts[category] = f"{texts.get(category, '')} {one.strip()}"
        values: dict[str, float] = {}
        for name, text in texts.items():
            before = "" if name == "other" else f"{name}/"
            for cell in filter(None, map(self._cell.fullmatch, map(str.strip, text.split(" | ")))):
                # A name that is wider than the panel continues on the next line.
                values[f"{before}{cell['name'].replace(' ', '')}"] = float(cell["number"])
        if not any(name.startswith("eval/") for name in values):
            self._step = values.pop("training_step", math.nan)
        row = ConsoleRow("open-instruct", self._step, values, line)
        return () if math.isnan(self._step) else (row,)
