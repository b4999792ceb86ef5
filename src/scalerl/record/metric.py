"""What the values of a run's evaluations are: the metric, its kind, and the prompts behind it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scalerl.errors import counted

Kind = Literal["pass rate", "reward in [0, 1]", "reward", "training reward"]
"""A share of correct completions; a mean reward that stays in [0, 1], or in [-1, 1] for rewards of -1 and 1;
a mean reward on another scale, which is fitted only as a share of a given maximum; and a measurement on the
prompts of training."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_RIGHT = (
    r"acc(?:uracy)?|correct(?:ness)?|passed|pass_?rate|pass(?:@|_at_|_)1|solved?|solve_?rate|success|"
    r"exact_?match"
)
_CORRECTNESS = re.compile(
    rf"(?:^|[/_.\-@ ]|(?-i:(?<=[a-z])(?=[A-Z])))(?:{_RIGHT}|pass(?!(?:@|\^|_at_|_|at)[\dk])|right)"
    r"(?=[/_.\-@ ]|$|(?-i:[A-Z]))",
    re.IGNORECASE,
)
"""A word for correctness in the name of a metric, also in camel case: MathAccuracy."""
_SHARE_OF_RIGHT = re.compile(
    rf"(?:^|[/_.\-@ ])(?:{_RIGHT}|success_?rate)"
    r"(?:[/_.\- ](?:mean|avg|rate|percent|pct|%))?(?:(?:@|_at_)\d+)?$",
    re.IGNORECASE,
)
_OF_ELSE = re.compile(r"train|token|format|best|maj|std|stderr|(?<![a-z])(?:num|n)_|count", re.IGNORECASE)
_TRAINING = re.compile(r"(?:train|training)(?=[/_.\- ]|$)|rewards?/", re.IGNORECASE)
_REWARD = re.compile(r"(?:^|[/_.\-@ ])(?:rewards?|returns?)(?=[/_.\-@ ]|$)", re.IGNORECASE)
_SCORE = re.compile(r"(?:^|[/_.\-@ ])scores?(?=[/_.\-@ ]|$)", re.IGNORECASE)
_OF_SEVERAL = re.compile(
    r"(?:^|[/_.\-@ ])(?:pass|best|maj|cons|worst)(?:@|\^|_at_)(?!1(?!\d))(?:\d+|k)(?=[/_.\-@ ]|$)",
    re.IGNORECASE,
)
_NO_SHARE = re.compile(
    r"(?:^|[/_.\-@ ])(?:loss|nll|perplexity|ppl|errors?|entropy|kl|wer|cer)(?=[/_.\-@ ]|$)", re.IGNORECASE
)
_EVALUATION = re.compile(
    r"(?:^|[/_.\- ])(?:evals?|evaluation|val|valid|validation|test|held_?out|hold_?out|dev)(?=[/_.\-@ ]|$)"
    r"|^(?:pass_rate|n_prompts|n_samples|mean_p_1mp)$|(?:mean|avg|pass|best|maj)(?:@|_at_)\d",
    re.IGNORECASE,
)


def is_named_for_correctness(name: str) -> bool:
    """Return whether a metric is, by its name, the share of correct completions."""
    return _CORRECTNESS.search(name) is not None


@functools.lru_cache(2**16)
def is_of_evaluation(name: str) -> bool:
    """Return whether a metric is, by its name, of evaluations, which may be logged long after their step."""
    return _EVALUATION.search(name) is not None


@functools.lru_cache(2**16)
def is_held_out_share(name: str) -> bool:
    """Return whether a metric that no known trainer logs is, by name, a held-out share of correct answers."""
    return is_share_of_right(name) and is_of_evaluation(name)


def is_share_of_right(name: str) -> bool:
    """Return whether a metric is, by its name, a share of correct answers, not a count or spread of them."""
    return _SHARE_OF_RIGHT.search(name) is not None and _OF_ELSE.search(name) is None


def kind_of(name: str) -> Kind:
    """Return the kind of a metric that the user has named, as far as its name shows it.

    A reward whose name does not say that it is held out is a training reward: trainers name theirs so.
    """
    if _TRAINING.match(name):
        return "training reward"
    if is_named_for_correctness(name):
        return "pass rate"
    if _REWARD.search(name):
        return "reward in [0, 1]" if is_of_evaluation(name) else "training reward"
    return "reward in [0, 1]" if _SCORE.search(name) else "pass rate"


def scaled_by(name: str, wrong: float, right: float) -> str:
    """Return a sentence on how rewards are turned into shares of correct answers."""
    if not wrong:
        return f"'{name}' is divided by {right:g}"
    minus = f"reward + {-wrong:g}" if wrong < 0 else f"reward - {wrong:g}"
    return f"'{name}' is made a pass rate by ({minus}) / {right - wrong:g}"


@dataclass(frozen=True)
class Metric:
    """The metric that stands for the pass rate.

    The definitions of this package are about a held-out pass rate. A reward stands in for one; for a training
    reward no ceiling is identified, and neither go nor no-go is given.
    """

    name: str = "pass_rate"
    """Name of the metric in the log or table."""
    kind: Kind = "pass rate"
    dataset: str = ""
    """The data set or task of its prompts; empty where that is not known."""
    n_prompts: int = 0
    n_samples: int = 0
    """Completions per prompt; 0 means not known, as for `n_prompts`."""
    others: tuple[str, ...] = ()
    """Other metrics that could have been taken."""
    is_chosen: bool = True
    """Whether the user or the run's own trainer named it, so that nothing was guessed."""

    @classmethod
    def of_column(cls, name: str) -> Metric:
        """Return the metric that the user has named: a column of a table or a metric of a log."""
        return cls(name, kind_of(name))

    def is_alike(self, other: Metric) -> bool:
        """Return whether values of both may share an axis: one measure, and the same prompts where known."""
        # Trackers log the pass rate of a run folder as eval/pass_rate.
        names = [one.name.removeprefix("eval/") for one in (self, other)]
        same_set = not (self.dataset and other.dataset) or self.dataset == other.dataset
        return names[0] == names[1] and self.kind == other.kind and same_set

    def is_comparable(self, other: Metric) -> bool:
        """Return whether both are one measure, by their names or because the user has named both."""
        is_named = self.name != other.name and self.is_chosen and other.is_chosen
        # But pass@8 or a loss is, by its name, not the measure that a pass rate is.
        return self.is_alike(other) or (is_named and bool(self.doubt) == bool(other.doubt))

    @property
    def subject(self) -> str:
        """The subject of a sentence about its values: `the pass rate`, or another name in quotes."""
        return "the pass rate" if self.name == GIVEN.name else f"'{self.name}'"

    @property
    def split(self) -> Literal["held-out", "training"]:
        """The split of its prompts: held out, or training."""
        return "training" if self.kind == "training reward" else "held-out"

    @property
    def is_ambiguous(self) -> bool:
        """Whether another metric may have been meant: nothing irreversible should follow from this one."""
        return not self.is_chosen and (self.kind != "pass rate" or bool(self.others))

    @property
    def no_verdict(self) -> str:
        """Why no ceiling is identified and no verdict given, in one sentence; empty where they may be."""
        if self.kind != "training reward":
            return ""
        return (
            f"'{self.name}' is a training reward: it is measured on prompts that are trained on, by weights "
            "of several versions, and says nothing certain of a held-out pass rate"
        )

    @property
    def doubt(self) -> str:
        """Why it may not be a pass rate, by its name, in one sentence; empty if nothing suggests that."""
        if _OF_SEVERAL.search(self.name):
            return (
                f"'{self.name}' is no pass rate of single completions, by its name: ceiling, target and "
                "verdicts are of this metric"
            )
        if not is_named_for_correctness(self.name) and _NO_SHARE.search(self.name):
            return f"'{self.name}' is no share of right answers, by its name; it is fitted as if it were one"
        return ""

    def __str__(self) -> str:
        """Return its description in one line: `eval/acc, held-out pass rate of math (500 prompts x 4)`."""
        kind = self.kind if self.split == "training" else f"held-out {self.kind}"
        counts = [counted(self.n_prompts, "prompt")] if self.n_prompts else []
        counts += [f"{counted(self.n_samples, 'sample')} each"] if self.n_samples else []
        of = f" of {self.dataset}" if self.dataset else ""
        return f"{self.name}, {kind}{of}" + (f" ({', '.join(counts)})" if counts else "")

    def to_json(self) -> dict[str, Any]:
        """Return the object `metric` of JSON answers, which is also in config.json of an imported run."""
        return {
            "name": self.name,
            "kind": self.kind,
            "split": self.split,
            "dataset": self.dataset or None,
            "prompts": self.n_prompts or None,
            "samples": self.n_samples or None,
            "others": list(self.others),
            "chosen": self.is_chosen,
        }

    @classmethod
    def parse(cls, found: Any) -> Metric | None:
        """Return the metric of `to_json`; None for anything else."""
        if not isinstance(found, Mapping) or found.get("kind") not in KINDS:
            return None
        others = found.get("others")
        prompts, samples = (found.get(key) for key in ("prompts", "samples"))
        return cls(
            str(found.get("name")),
            found["kind"],
            str(found.get("dataset") or ""),
            prompts if isinstance(prompts, int) else 0,
            samples if isinstance(samples, int) else 0,
            tuple(map(str, others)) if isinstance(others, list) else (),
            found.get("chosen") is not False,
        )


GIVEN = Metric()
"""The metric of pass rates that are given as arrays."""
