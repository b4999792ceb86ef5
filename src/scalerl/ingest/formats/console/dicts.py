"""Rows that are dict literals: of OpenRLHF, slime, SkyRL, and the Hugging Face Trainer (TRL)."""

import ast
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from scalerl.ingest.formats.console.lines import MOST_PROCESSES, NUMBER, ConsoleForm, ConsoleLine, ConsoleRow
from scalerl.jsonl import flat

_LONGEST = 2**18
"""Most characters of a dict; the largest of a real run had 20,000. Parsing takes 500 times the memory."""
_MOST_LINES = 5000
"""Lines within which a dict that spans several has to end."""
_NUMBER = re.compile(NUMBER)
_WRAPPED = re.compile(r"\b[A-Za-z][\w.]{0,30}\(\s{0,9}([^()'\",]{1,60})(?:,[^()]{0,60})?\)")
"""A number in np.float64(0.3) or tensor(0.3, device='cuda:0')."""
_NOT_FINITE = re.compile(r"(?<=[ :\[,])([-+]?(?:nan|inf))(?=[,\]}\s])")


def parse_dict(text: str, where: str) -> dict[str, object] | None:
    """Parse a dict literal up to its last brace; None if it is not a dict of metrics.

    Nested names are joined by `/`. A text that is a number becomes one, as SkyRL and Transformers 5 print
    numbers as text.

    Raises:
        InputError: it has more values, levels or characters of names than the limits allow.
    """
    text = text[: text.rfind("}") + 1]
    if not text or len(text) > _LONGEST:
        return None
    text = _NOT_FINITE.sub(r"'\1'", _WRAPPED.sub(r"\1", text))
    with warnings.catch_warnings():
        # For `1in`, in a damaged row, Python would print a warning on the user's terminal.
        warnings.simplefilter("ignore")
        try:
            found = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return None
    named = flat(found, separator="/", where=where)
    return {n: float(v) if isinstance(v, str) and _NUMBER.fullmatch(v) else v for n, v in named.items()}


class DictRows(ConsoleForm):
    """Dicts on one line, recognised by the words before them.

    OpenRLHF 0.8 to 0.11 (openrlhf/trainer/ppo_trainer.py, ppo_trainer_async.py): `Global step 1: {...}`,
    `Evaluation completed in 0:00:09, global_step 1, eval_metrics: {...}`, `Eval at step 1: {...}`.

    slime 0.1 to 0.3 (slime/ray/rollout.py, slime/backends/megatron_utils, slime/observability since):
    `rollout 0: {...}`, `perf 0: {...}`, `step 0: {...}`, `eval 0: {...}`. It counts rollouts from 0, and
    evaluates after the training on one, so that all get one step more; an `eval 0` before the first rollout
    is at step 0. Its `step` counts updates, of which a rollout may have several: the last of them is at the
    step of the rollout.

    The Trainer of Transformers (trainer_callback.py: `ProgressCallback`, `PrinterCallback`) prints bare
    dicts, since 5.0 with numbers as text of four digits; each of them has its `epoch`.
    """

    _dict = re.compile(r"\{['\"]")
    _openrlhf = re.compile(r"(?:Global step |global_step |Eval at step )(\d{1,15})(?:, eval_metrics)?: ?$")
    _slime = re.compile(
        r"(?:^|[\s|-])(?P<what>eval|rollout|perf|multi_turn|passrate|(?:critic-)?step) (?P<n>\d{1,15}): ?$"
    )
    _bare = re.compile(r"\s*(?:\[[\w,. ]{0,60}\](?:<std(?:out|err)>)?:?|\d{1,6}:)?\s*")
    """Text before a dict: none, or the rank, as torchrun, mpirun and srun print it."""

    def __init__(self) -> None:
        self._rollout = math.nan
        self._has_rolled = False

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return its row."""
        if "{" not in line.text or (found := self._dict.search(line.text)) is None:
            return ()
        before, start = line.text[max(found.start() - 100, 0) : found.start()], found.start()
        if step := self._openrlhf.search(before):
            return self._row("openrlhf", float(step[1]), line, start)
        if step := self._slime.search(before):
            return self._row("slime", self._step_of_slime(step["what"], float(step["n"])), line, start)
        if start < 100 and self._bare.fullmatch(before) and "'epoch'" in line.text:
            rows = self._row("trl", math.nan, line, start)
            values = rows[0].values
            return rows if values is None or ("epoch" in values and "train_runtime" not in values) else ()
        return ()

    def _row(self, trainer: str, step: float, line: ConsoleLine, start: int) -> Sequence[ConsoleRow]:
        values = parse_dict(line.text[start:], line.where)
        return (ConsoleRow(trainer, step, values, line, is_closed=values is not None or line.whole),)

    def _step_of_slime(self, what: str, n: float) -> float:
        if what == "eval":
            return n + 1 if n or self._has_rolled else 0.0
        self._has_rolled = True
        if what.endswith("step"):
            return self._rollout + 1
        if what == "rollout":  # the trainer's; those of the generators may be ahead
            self._rollout = n
        elif what == "perf" and n == self._rollout:  # the trainer has finished it
            self._rollout = math.nan
        return n + 1


@dataclass
class _Open:
    """A dict that continues in the next lines of its process."""

    step: float
    line: ConsoleLine
    parts: list[str] = field(default_factory=list)
    characters: int = 0
    depth: int = 0


class SkyRLRows(ConsoleForm):
    """`Step 1: ` on one line, and on the next ones the dict as pprint prints it.

    From SkyRL 0.1 to the main branch of August 2026: `ConsoleLogger` in skyrl/train/utils/tracking.py
    (skyrl_train/utils/tracking.py before), numbers as text with four decimals.
    """

    _start = re.compile(r"(?:^| - )Step (\d{1,15}): ?$")
    _next = re.compile(r" +['\"\d\-\[({]|[ )\]]*\}")

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return the row that ends with it."""
        text = line.text
        if text.rstrip().endswith(":") and (found := self._start.search(text)):
            before = self._open.pop(line.process, None)
            if len(self._open) < MOST_PROCESSES:
                self._open[line.process] = _Open(float(found[1]), line)
            return () if before is None else (self._row(before, line),)
        one = self._open.get(line.process)
        if one is None or not (self._next.match(text) if one.parts else text.startswith("{")):
            return ()  # a line of another process
        one.parts.append(text)
        one.characters += len(text)
        one.depth += text.count("{") - text.count("}")
        if one.depth > 0 and len(one.parts) < _MOST_LINES and one.characters < _LONGEST:
            return ()
        del self._open[line.process]
        return (self._row(one, line),)

    def end(self) -> Sequence[ConsoleRow]:
        """Return the unfinished rows."""
        return tuple(self._row(one, None) for one in self._open.values())

    def _row(self, one: _Open, last: ConsoleLine | None) -> ConsoleRow:
        values = None if one.depth > 0 else parse_dict("\n".join(one.parts), one.line.where)
        return ConsoleRow("skyrl", one.step, values, one.line, is_closed=last is not None)
