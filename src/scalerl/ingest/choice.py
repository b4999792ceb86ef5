"""Choose the metric of a log that stands for the pass rate, among all that could.

held-out pass rate    in [0, 1], or percent where its name or the user says so: taken
held-out reward       taken with a warning where it stays in [0, 1], or in [-1, 1] for rewards of -1 and 1
sum of rewards        never taken; its part that is named for correctness is, else the user has to choose
training reward       only where the user names it; then no ceiling is identified
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.errors import InputError, listed, printable
from scalerl.ingest.logs.log import Log, Series
from scalerl.ingest.logs.order import REASONS, code_of
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.shares import completions_of, n_samples, shares_of
from scalerl.ingest.vocabularies import Vocabulary, is_of_training, set_of, timed_set, wildcard
from scalerl.record.left_out import APART, NO_STEP, NONE, REPEATED, VALUELESS, LeftOut, Omitted, shown_step
from scalerl.record.metric import (
    Kind,
    Metric,
    is_held_out_share,
    is_named_for_correctness,
    is_of_evaluation,
    kind_of,
)

_LEAST_GAPS = 7
"""Least gaps between values, as of four evaluations on two sets, for a pattern to show in them."""
_ORDERED = 0.9
"""Share of the evaluations in which several sets have the same order by their values."""


@dataclass(frozen=True)
class Candidate:
    """A metric of a log that could stand for the pass rate."""

    metric: Metric
    series: Series
    """The values as logged."""
    rate_N: np.ndarray
    """The values as shares in [0, 1]; empty where they cannot be converted."""
    how: str
    """How they were converted, as a sentence; empty where they are as logged."""
    why_not: str
    """Why it is no pass rate, as a clause behind the name of the log; empty where it may be one."""
    n_made: int
    """Number of evaluations, including those without a value."""
    left_out: LeftOut = NONE
    """The evaluations that do not count in a mean over data sets."""
    n_completions: int = 0
    """Completions of each evaluation, inferred from the fractions that the values are; 0 if not certain."""

    @property
    def name(self) -> str:
        """Name of the metric in the log."""
        return self.metric.name


def choose(log: Log, vocabulary: Vocabulary, asked: ReadOptions) -> tuple[Candidate, list[str]]:
    """Choose the metric that stands for the pass rate; return it, and warnings about the choice.

    Raises:
        InputError: no metric can be the pass rate, several could, or the named one cannot; with the choices.
    """
    found = candidates(log, vocabulary, asked)
    sets = [one for one in map(timed_set, log.metrics) if one]
    made = [one.name for one in found if is_of_evaluation(one.name)]
    if len(sets) > 1 and made and not any(part in name for name in made for part in sets):
        raise InputError(
            f"{log.source}: '{made[0]}' is logged for each of {listed(sets)}, and nothing tells which "
            "value is of which: read trainer_state.json or W&B's files, whose rows do"
        )
    if asked.pooled:
        return _pooled(log, found, asked)
    sets = {part for one in found for part in (one.name, one.metric.dataset)}
    warnings = [
        f"{log.source}: no held-out data set or metric '{name}', whose prompts are given"
        for name in asked.prompts
        if name and name not in sets
    ]
    if asked.metric is not None:
        usable = [one for one in found if not one.why_not]
        if not usable:
            raise InputError(f"{log.source}: {found[0].why_not}")
        usable = [one for one in usable if one.metric.kind == "pass rate"] or usable
        chosen = _largest(usable, asked, warnings)
    else:
        chosen = _unasked(log, vocabulary, found, asked, warnings)
    if _comes_in_turns(log, chosen.name):
        raise InputError(
            f"{log.source}: '{chosen.name}' has several values at each evaluation, as of several data sets, "
            "and nothing tells which value is of which: add eval/SET_runtime of every set to the chart, or "
            "read trainer_state.json or W&B's files, whose rows do"
        )
    if chosen.how:
        warnings.append(chosen.how)
    is_named = asked.metric is not None and len(found) == 1
    others = tuple(one.name for one in found if one is not chosen)
    metric = replace(chosen.metric, others=others, is_chosen=is_named)
    return replace(chosen, metric=metric), warnings


def _comes_in_turns(log: Log, name: str) -> bool:
    """Return whether a chart has values of several sets in turn: at one step, or at one step after another.

    TRL logs several evaluation sets under one name, each by a call of its own, and W&B counts calls.
    """
    omitted, series = log.omitted.get(name), log.metrics[name]
    again_V = omitted.step_V[omitted.reason_V == code_of(REPEATED)] if omitted is not None else np.zeros(0)
    gap_V = np.diff(np.sort(np.concatenate([series.step_N, again_V])))
    if log.format != "wandb-csv" or len(gap_V) < _LEAST_GAPS:
        return False
    is_near_V = (gap_V <= 1) & (gap_V < gap_V.max())
    sets = int(np.argmin(is_near_V)) + 1
    if sets == 1 or (is_near_V != (np.arange(len(gap_V)) % sets < sets - 1)).any():
        return False
    if len(again_V):
        return True
    # A run of one set that lacks every so many steps rises on; several sets keep their order, and go back.
    turn_TK = series.value_N[: len(series) // sets * sets].reshape(-1, sets)
    is_ordered_T = (np.argsort(turn_TK) == np.argsort(turn_TK.mean(axis=0))).all(axis=1)
    change = np.mean(turn_TK[:, -1] - turn_TK[:, 0]) * np.mean(turn_TK[1:, 0] - turn_TK[:-1, -1])
    return bool(change < 0 and is_ordered_T.mean() >= _ORDERED)


def candidates(log: Log, vocabulary: Vocabulary, asked: ReadOptions) -> list[Candidate]:
    """Return the metrics that could be meant: the named ones, or all held-out ones, best known first.

    Raises:
        InputError: no metric has the given name.
    """
    if asked.metric is not None:
        names = _named(log, vocabulary, printable(asked.metric), asked)
        return [_candidate(log, vocabulary, one, _kind_of_named(one, vocabulary), asked) for one in names]
    kinds: dict[str, Kind] = dict.fromkeys(vocabulary.matches("pass_rate", log.metrics), "pass rate")
    for name in vocabulary.matches("reward_parts", log.metrics):
        kinds.setdefault(name, "pass rate" if is_named_for_correctness(name) else "reward")
    rewards = vocabulary.matches("eval_reward", log.metrics)
    if "pass rate" not in kinds.values():
        # A trainer may call a mean reward an accuracy.
        shares = (name for name in log.metrics if name not in rewards and is_held_out_share(name))
        kinds |= dict.fromkeys(shares, "pass rate")
    for name in rewards:
        kinds.setdefault(name, "reward")
    return [_candidate(log, vocabulary, name, kind, asked) for name, kind in kinds.items()]


def _named(log: Log, vocabulary: Vocabulary, given: str, asked: ReadOptions) -> list[str]:
    """Return the metrics that `given` means: a name, a pattern, or the first that exists of a comma list."""
    if given in log.metrics:
        return [given]
    for one in given.split(","):
        if one in log.metrics:
            return [one]
        pattern = re.compile(wildcard(one), re.DOTALL)
        like = sorted(filter(pattern.fullmatch, log.metrics)) if "*" in one else []
        # Spreads and lengths of completions may match a pattern, but are not meant.
        held_out = [name for name in like if is_held_out_share(name) or vocabulary.held_out([name])]
        if found := held_out or vocabulary.matches("train_reward", like):
            return found
        if like:
            raise InputError(
                f"{log.source}: no metric like '{one}' is a known pass rate or reward; to take one, "
                f"write {asked.naming('NAME')}: {listed(like)}"
            )
    there = f"there are {listed(_likely(log.names))}"
    if not log.names:
        there = "no value of any metric is a number (does the importer yield text?)"
    raise InputError(
        f"{log.source}: no metric '{asked.metric}' with numbers; {_all_left_out(log, [given])}{there}"
    )


def _kind_of_named(name: str, vocabulary: Vocabulary) -> Kind:
    """Return the kind of a metric that the user has named."""
    if vocabulary.matches("pass_rate", [name]):
        return "pass rate"
    if vocabulary.matches("reward_parts", [name]) or vocabulary.matches("eval_reward", [name]):
        return "pass rate" if is_named_for_correctness(name) else "reward"
    # If nothing shows what wrote the log, a bare `accuracy` is what the user says it is.
    is_told = vocabulary.signs or not is_named_for_correctness(name)
    if is_of_training(name) or (is_told and vocabulary.matches("train_reward", [name])):
        return "training reward"
    return kind_of(name)


def _candidate(log: Log, vocabulary: Vocabulary, name: str, kind: Kind, asked: ReadOptions) -> Candidate:
    series = log.metrics[name]
    rate_N, how, why_not = shares_of(series.value_N, name, log, vocabulary, asked)
    dataset = set_of(name, [*vocabulary.pass_rate, *vocabulary.reward_parts, *vocabulary.eval_reward])
    samples = n_samples(name) or _logged_count(log, vocabulary, "n_samples", dataset)
    prompts = asked.n_prompts(name, dataset) or _logged_count(log, vocabulary, "n_prompts", dataset)
    # NaN counts: a pass rate that diverged must not give way to a metric that did not.
    made = len(series) + sum(n for reason, n in left_out_of(log, name).counts if reason in VALUELESS)
    kept: Kind = "reward in [0, 1]" if kind == "reward" and not why_not else kind
    completions = completions_of(series.value_N)  # with the completions of each prompt it gives the prompts
    metric = Metric(name, kept, dataset, prompts or (completions // samples if samples else 0), samples)
    return Candidate(metric, series, rate_N, how, why_not, made, n_completions=completions)


def _unasked(
    log: Log, vocabulary: Vocabulary, found: Sequence[Candidate], asked: ReadOptions, warnings: list[str]
) -> Candidate:
    """Choose a metric where the user has named none."""
    if not found:
        raise InputError(f"{log.source}: {_nothing_held_out(log, vocabulary, asked)}")
    rates = [one for one in found if one.metric.kind == "pass rate"]
    if usable := [one for one in rates if not one.why_not]:
        chosen = _largest(usable, asked, warnings)
        if chosen.name not in vocabulary.held_out([chosen.name]):
            warnings.append(
                f"'{chosen.name}' is assumed to be the held-out pass rate by its name; confirm it with "
                f"{asked.naming(chosen.name)}"
            )
        return chosen
    parts = [one for one in found if vocabulary.matches("reward_parts", [one.name])]
    if rates or len(parts) > 1:
        raise InputError(f"{log.source}: {_refusal(found, rates, asked)}")
    usable = [one for one in parts or found if not one.why_not]
    if not usable:
        raise InputError(f"{log.source}: {_refusal(found, found[:1], asked)}")
    chosen = _largest(usable, asked, warnings)
    others = [one.name for one in found if one.name != chosen.name]
    beside = f", one of {listed(others)}" if others else ""
    warnings.append(
        f"'{chosen.name}' is a held-out reward used as the pass rate, which is right only if a right "
        f"answer earns 1 and any other 0; else give {asked.naming('NAME')}{beside}"
    )
    return chosen


def _refusal(found: Sequence[Candidate], blamed: Sequence[Candidate], asked: ReadOptions) -> str:
    """Explain why none of the held-out metrics is taken, and list the choices."""
    several = "the reward has several parts, and none of them is named for correctness"
    return (
        f"{blamed[0].why_not if blamed else several}; held out are {listed([one.name for one in found])}: "
        f"name the metric of right answers with {asked.naming('NAME')}, and what a right answer earns, if "
        f"not 1, with {asked.naming(name='max_reward')} X"
    )


def _nothing_held_out(log: Log, vocabulary: Vocabulary, asked: ReadOptions) -> str:
    left_out = _all_left_out(log, vocabulary.held_out(log.omitted))
    hint = f"{log.hint}; " * bool(log.hint)
    training = vocabulary.matches("train_reward", log.metrics)
    known = [name for name in training if _kind_of_named(name, vocabulary) == "training reward"]
    # What may be held out, judging by its name.
    others = [name for name in log.names if is_of_evaluation(name) or is_named_for_correctness(name)]
    others = _likely([name for name in others if _kind_of_named(name, vocabulary) != "training reward"])
    if known:
        beside = f"; name what is held out of {listed(others)}" if others else ""
        return (
            f"{hint}no metric is held out: '{known[0]}' is a training reward, which does not determine a "
            f"held-out pass rate; {left_out}{asked.naming(known[0])} fits it without a ceiling or verdict"
            f"{beside}"
        )
    names = listed(_likely(log.names))
    choices = f"{asked.naming()} takes one of: {names}" if names else "there are no metrics with numbers"
    return f"{hint}no metric here is a known pass rate or reward; {left_out}{choices}"


def _largest(found: Sequence[Candidate], asked: ReadOptions, warnings: list[str]) -> Candidate:
    """Return the candidate with most prompts, else completions, else evaluations; warn about the others."""
    # `max` returns the first of equal ones.
    chosen = max(found, key=lambda one: (one.metric.n_prompts, one.n_completions, one.n_made))
    if others := [one.name for one in found if one is not chosen]:
        n_alike = sum(one.metric.n_prompts == chosen.metric.n_prompts for one in found)
        by = "the first, as the prompts of none are known,"
        by = "that with most completions" if chosen.n_completions else by
        if chosen.metric.n_prompts:
            by = "the first of those with most prompts" if n_alike > 1 else "that with most prompts"
        warnings.append(
            f"of {len(found)} held-out metrics {by} is taken, '{chosen.name}'; {asked.naming('NAME')} takes "
            f"another of {listed(others)}"
        )
    return chosen


def _pooled(log: Log, found: Sequence[Candidate], asked: ReadOptions) -> tuple[Candidate, list[str]]:
    """Return the mean over data sets, weighted by their prompts, at the steps that all have."""
    usable = [one for one in found if not one.why_not]
    rates = [one for one in usable if one.metric.kind == "pass rate"] or usable
    rates = [one for one in rates if one.metric.kind == rates[0].metric.kind]
    if len(rates) < 2:
        names = listed([one.name for one in found]) or "none"
        raise InputError(f"{log.source}: --pooled needs two held-out data sets or more, found {names}")
    if unknown := [one.name for one in rates if not one.metric.n_prompts]:
        raise InputError(
            f"{log.source}: --pooled weights by prompts, and those of '{unknown[0]}' are not logged: give "
            "--prompts SET=N,SET=N"
        )
    steps = [one.series.step_N for one in rates]
    common_N = functools.reduce(np.intersect1d, steps)
    if not len(common_N):
        raise InputError(f"{log.source}: {listed([one.name for one in rates])} have no step in common")
    places = [np.searchsorted(one.series.step_N, common_N) for one in rates]
    weight_K = np.array([one.metric.n_prompts for one in rates], dtype=float)
    rate_KN = np.array([one.rate_N[place_N] for one, place_N in zip(rates, places, strict=True)])
    first = rates[0].series
    series = replace(
        first, step_N=common_N, value_N=weight_K @ rate_KN / weight_K.sum(), time_N=first.time_N[places[0]]
    )
    names, sets = [one.name for one in rates], [one.metric.dataset or one.name for one in rates]
    samples = {one.metric.n_samples for one in rates}
    metric = Metric(
        f"mean of {listed(names)}",
        rates[0].metric.kind,
        " + ".join(sets),
        int(weight_K.sum()),
        samples.pop() if len(samples) == 1 else 0,
        tuple(one.name for one in found if one.name not in names),
    )
    apart_N = np.setdiff1d(np.concatenate(steps), common_N)
    left_out = LeftOut.of(Omitted(APART, shown_step(step)) for step in apart_N.tolist())
    pooled = Candidate(metric, series, series.value_N, "", "", len(series), left_out)
    return pooled, [one.how for one in rates if one.how]


def _logged_count(log: Log, vocabulary: Vocabulary, role: str, dataset: str) -> int:
    for name in vocabulary.matches(role, log.metrics):
        if set_of(name, getattr(vocabulary, role)) in ("", dataset):
            last = float(log.metrics[name].value_N[-1])
            return int(last) if 0 < last < 1e9 else 0
    return 0


def left_out_of(log: Log, name: str) -> LeftOut:
    """Return the evaluations of a metric that do not count, with an ending if the newest are among them."""
    omitted = log.omitted.get(name)
    if omitted is None:
        return NONE
    step_V = np.where(omitted.reason_V == code_of(NO_STEP), math.nan, omitted.step_V)
    places = zip(omitted.step_V.tolist(), omitted.line_V.tolist(), omitted.reason_V.tolist(), strict=True)
    found = [Omitted(REASONS[code], shown_step(step), line or None) for step, line, code in places]
    series = log.metrics.get(name)
    return LeftOut.of_log(found, step_V, series.step_N if series is not None else np.zeros(0), name)


def _all_left_out(log: Log, names: Sequence[str]) -> str:
    """Explain why metrics that were logged have no evaluation that counts; empty if none was logged."""
    sentences = [text for name in names for text in left_out_of(log, name).sentences()[-1:]]
    return f"{sentences[0]}; " if sentences else ""


def _likely(names: Sequence[str]) -> list[str]:
    """Sort names, those that sound like a pass rate first."""
    sound = re.compile(r"acc|pass|reward|score|success|correct|mean@|avg@", re.IGNORECASE)
    return sorted(names, key=lambda name: (not sound.search(name), name))
