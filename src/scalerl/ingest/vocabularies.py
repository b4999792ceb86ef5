"""What the metrics of a trainer mean: for every quantity used here, the names that trainers give it.

The names are in vocabularies.toml, with a table for each trainer. A name is a pattern: `*` is any text, and
`<set>` the bare name of an evaluation set. Trainers that log through a tracker put a word before their names
(`train/`, `global/`), which is accepted. So is `_at_` for `@`, which MLflow allows in no name (verl writes it
so, verl/utils/tracking.py).
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scalerl.record.metric import is_of_evaluation

_PLAIN_SET = r"(?!step$|[^/]*(?:-truncated_ratio$|pass(?:@|_at_)?\d))[^/]+"
"""The SET of slime's eval/SET, not eval/SET-truncated_ratio, eval/SET-pass@2, eval/SET/... or eval/step."""
_PREFIXES = ("", "train/", "global/", "rollout/")
"""Prefixes that trackers' integrations put before a trainer's own names.

`eval/` is not one of them, as the entropy of an evaluation is not that of a step: names of evaluations
contain it.
"""


@dataclass(frozen=True)
class TrainerConsole:
    """The console of one trainer: how it is recognised, and its settings for validation and metrics."""

    name: str
    """Name of the trainer, as its authors write it."""
    signs: str
    """A regular expression for names of its modules and processes, which appear in all of its consoles."""
    validation: str
    """The settings that switch validation on, in the version that the vocabulary is from."""
    rows: str = ""
    """The setting that prints metrics; empty where they are always printed."""
    note: str = ""
    """A note for every reader of its rows."""


@dataclass(frozen=True)
class Vocabulary:
    """The metrics of one trainer by their role here; of several names the first that occurs counts."""

    trainer: str
    console: TrainerConsole | None = None
    signs: tuple[str, ...] = ()
    """Names that distinguish this trainer's logs from those of others."""
    pass_rate: tuple[str, ...] = ()
    """Share of correct completions of held-out prompts. `{set}` in a name is any text: the data set."""
    eval_reward: tuple[str, ...] = ()
    """Mean reward of completions of held-out prompts, which is a pass rate if rewards are 0 and 1."""
    reward_parts: tuple[str, ...] = ()
    """Held-out reward of every reward function, where `eval_reward` is their weighted sum."""
    spreads: tuple[str, ...] = ()
    """Standard deviation of the rewards of `reward_parts`."""
    set_seconds: tuple[str, ...] = ()
    """Seconds of an evaluation on one of several sets, whose rewards are logged without the set's name."""
    train_reward: tuple[str, ...] = ()
    """Mean reward over the training prompts: what is left where nothing is held out."""
    entropy: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    """Share of completions that were cut off by their budget of tokens."""
    finished: tuple[str, ...] = ()
    """Share of completions that were not cut off: 1 - truncated."""
    ratio_clipped: tuple[str, ...] = ()
    staleness_mean: tuple[str, ...] = ()
    """Staleness of the trained tokens, in versions."""
    mean_length: tuple[str, ...] = ()
    kl: tuple[str, ...] = ()
    grad_norm: tuple[str, ...] = ()
    loss: tuple[str, ...] = ()
    lr: tuple[str, ...] = ()
    step_seconds: tuple[str, ...] = ()
    """Wall-clock seconds of one step."""
    row_seconds: tuple[str, ...] = ()
    """Wall-clock seconds since the row before, however many steps lie between."""
    evaluation_seconds: tuple[str, ...] = ()
    """Seconds of evaluations that are included in those of a step."""
    devices: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    """Tokens generated in one step, prompts included where the trainer counts them."""
    tokens_so_far: tuple[str, ...] = ()
    """Tokens since the start."""
    samples: tuple[str, ...] = ()
    """Completions of one step."""
    samples_so_far: tuple[str, ...] = ()
    gpu_hours_so_far: tuple[str, ...] = ()
    """Device-hours of generating, training and idling since the start, without evaluations."""
    flops_so_far: tuple[str, ...] = ()
    """FLOPs of generation and training since the start."""
    tokens_processed_so_far: tuple[str, ...] = ()
    """Tokens generated plus tokens trained on, since the start."""
    n_prompts: tuple[str, ...] = ()
    """Held-out prompts of an evaluation; next, completions of each, and the mean over them of p (1 - p)."""
    n_samples: tuple[str, ...] = ()
    mean_p_1mp: tuple[str, ...] = ()
    device_sums: tuple[str, ...] = ()
    """The number of devices from keys of the config, as sums of products (`nodes * gpus + engines`); of
    several sums the first whose keys all exist counts."""
    sample_sums: tuple[str, ...] = ()
    """The number of completions of one step, in the same form."""
    scaled: tuple[tuple[str, str, float], ...] = ()
    """Rewards in units of what a correct answer earns: the name, the key of the config that gives the unit,
    and its usual value."""
    shares: tuple[str, ...] = ()
    """Names of shares in [0, 1] that nevertheless say percent."""
    counts_from_0: bool = False
    """Whether the first step is 0, and an evaluation comes after the update of its step."""

    def patterns(self) -> Iterator[str]:
        """Yield all names of this vocabulary."""
        yield from self.signs
        for role in ROLES:
            yield from getattr(self, role)

    def matches(self, role: str, names: Iterable[str]) -> list[str]:
        """Return the names that stand for a role, the best match first."""
        names = list(names)
        found: dict[str, None] = {}
        for pattern in getattr(self, role):
            found |= dict.fromkeys(sorted(name for name in names if is_like(name, pattern)))
        return list(found)

    def held_out(self, names: Iterable[str]) -> list[str]:
        """Return the names of metrics that are measured on held-out prompts."""
        names = list(names)
        roles = ("pass_rate", "reward_parts", "eval_reward")
        return [name for role in roles for name in self.matches(role, names)]


ROLES = tuple(
    f.name
    for f in fields(Vocabulary)
    if f.name not in ("trainer", "console", "signs", "scaled", "shares", "counts_from_0")
    and not f.name.endswith("_sums")
)


def is_like(name: str, pattern: str) -> bool:
    """Return whether a metric's name matches this pattern, also after a tracker's prefix."""
    return _compiled(pattern).fullmatch(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return any_of([pattern])


def any_of(patterns: Iterable[str], more: Sequence[str] = ()) -> re.Pattern[str]:
    """Compile names of trainers, with `*` for anything, and `more` names, which have no prefix."""
    prefixes = "|".join(map(re.escape, _PREFIXES))
    bodies = [_body(pattern).replace("<set>", _PLAIN_SET) for pattern in sorted(set(patterns))]
    exact = "".join(f"|{_body(name)}" for name in more)
    return re.compile(f"(?:{prefixes})(?:{'|'.join(bodies)}){exact}", re.DOTALL)


def _body(pattern: str) -> str:
    """Return a pattern as a regular expression, `<set>` left as it is."""
    return wildcard(pattern.replace("{set}", "*")).replace("@", "(?:@|_at_)")


def wildcard(pattern: str) -> str:
    """Return a name in which `*` is any text, as a regular expression."""
    return ".*".join(map(re.escape, pattern.split("*")))


def set_of(name: str, patterns: Iterable[str]) -> str:
    """Return the data set in a metric's name, by the first pattern that matches; else an empty string."""
    for pattern in patterns:
        if is_like(name, pattern):
            before, mark, after = re.split(r"(<set>|\{set\})|$", pattern, maxsplit=1)
            found = re.search(f"{_body(before)}(.*){_body(after)}$", name, re.DOTALL) if mark else None
            return found[1] if found else ""
    return ""


@functools.lru_cache(2**16)
def timed_set(name: str) -> str:
    """Return the evaluation set whose seconds a metric is, by its name; else an empty string."""
    return set_of(name, _SET_SECONDS)


def tell(names: Iterable[str]) -> Vocabulary | None:
    """Return the trainer with the most signs among the names; None without any."""
    names = list(names)
    counts = {
        one: sum(any(is_like(name, sign) for name in names) for sign in one.signs) for one in VOCABULARIES
    }
    best = max(counts, key=lambda vocabulary: counts[vocabulary])
    return best if counts[best] else None


def _of_table(trainer: str, table: dict[str, Any]) -> Vocabulary:
    console = TrainerConsole(**table.pop("console")) if "console" in table else None
    table["scaled"] = map(tuple, table.get("scaled", ()))
    from_0 = table.pop("counts_from_0", False)
    names_of = {role: tuple(names) for role, names in table.items()}
    return Vocabulary(trainer, console=console, counts_from_0=from_0, **names_of)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VOCABULARIES = tuple(_of_table(trainer, table) for trainer, table in _TABLES.items())
"""All vocabularies; the last has no signs, and is for logs that show none."""
ANY = VOCABULARIES[-1]
BY_TRAINER = {vocabulary.trainer: vocabulary for vocabulary in VOCABULARIES}
CONSOLES = {one.trainer: one.console for one in VOCABULARIES if one.console is not None}
"""The consoles, by trainer."""
_SET_SECONDS = tuple(itertools.chain(*(one.set_seconds for one in VOCABULARIES)))
_CONSOLE_SIGNS = {trainer: re.compile(console.signs.encode()) for trainer, console in CONSOLES.items()}
_OF_TRAINING = (
    *("train_reward", "ratio_clipped", "staleness_mean", "kl", "grad_norm", "loss", "lr"),
    *("step_seconds", "row_seconds", "tokens", "samples"),
)
"""Roles that an evaluator does not log; it may log lengths, entropies and counters since the start."""
_OF_EITHER = re.compile(r"(?:.*/)?(?:accuracy|acc|success_rate|scores?)", re.DOTALL)


def console_of(text: bytes) -> str | None:
    """Return the trainer with the most signs in the text of a console; None without any."""
    counts = {trainer: len(signs.findall(text)) for trainer, signs in _CONSOLE_SIGNS.items()}
    best = max(counts, key=lambda trainer: counts[trainer])
    return best if counts[best] else None


@functools.lru_cache(2**16)
def is_of_training(name: str) -> bool:
    """Return whether only a training step logs a metric of this name, under whatever prefix."""
    is_of_either = is_of_evaluation(name) or _OF_EITHER.fullmatch(name)
    return not is_of_either and _training_names().fullmatch(name) is not None


@functools.cache
def _training_names() -> re.Pattern[str]:
    roles = (getattr(vocabulary, role) for vocabulary in VOCABULARIES for role in _OF_TRAINING)
    return re.compile(rf"(?:.*/)?{any_of(itertools.chain(*roles)).pattern}", re.DOTALL)
