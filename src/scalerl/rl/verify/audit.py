"""`audit`: check which answers a task's verifier accepts, and check its prompts, before training.

A verifier that rejects right answers sets a ceiling on the pass rate; one that accepts wrong answers teaches
the policy to give these. Both faults are cheap to find beforehand:

    reference answers, in the forms that models write      must be accepted
    other answers, none, hedged, cut or echoed ones        must be rejected

Wrong answers are written in the form of `FORMS` that the verifier accepts best, so that they are rejected for
their content.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from scalerl.errors import ScalerlError, brief, in_one_line
from scalerl.rl.tasks.task import Task, prompts_of
from scalerl.rl.types import Prompt, as_reward
from scalerl.rl.verify.verifier import is_trusted
from scalerl.rl.verify.verifier_pool import Outcome, SupervisedVerifiers, job_of

Level = Literal["ok", "note", "fault"]
Form = Callable[[str], str]
_Pairs = Sequence[tuple[Prompt, str]]
"""Prompts, each with a text to verify or with its answer."""

FORMS: dict[str, Form] = {
    "as it is": lambda a: a,
    "boxed": lambda a: f"\\boxed{{{a}}}",
    "in <answer> tags": lambda a: f"<answer>{a}</answer>",
    "a sentence": lambda a: f"The answer is {a}.",
    "after thinking": lambda a: f"Let me see.</think> {a}",
    "after thinking, boxed": lambda a: f"Let me see.</think>\\boxed{{{a}}}",
}
"""How completions write an answer."""
BLOCKS: dict[str, Form] = {
    "in a code block": lambda a: f"```\n{a}\n```",
    "after thinking, in a code block": lambda a: f"Let me see.</think> So:\n```\n{a}\n```",
}
"""Further forms for an answer of several lines."""
N_GRAM = 13
"""Words in a row that a held-out and a training prompt must not share (as in GPT-3's overlap analysis)."""
_COMMON = 0.02  # share of the training prompts; words that more of them share belong to a template
TOLERATED = 0.01
"""Share of answers with the wrong verdict above which there is a fault."""
_SLOW_MS = 1000.0
_LONG_ANSWER = 5  # letters; shorter ones occur by chance
_WHOLE = re.compile(r"-?[1-9]\d{0,15}|0")
_EMPTY = (
    "",
    "I do not know.",
    "The answer is correct.",
    "True",
    "\\boxed{}",
    '{"score": 1.0, "correct": true}',
)


class AuditError(ScalerlError):
    """The audit of a task found faults, which are printed."""

    exit_status = 1


@dataclass(frozen=True)
class AuditFinding:
    """One line of an audit."""

    check: str
    result: str
    level: Level
    share: float | None = None
    """Share of the answers that were accepted, or of the prompts that the check has found."""
    example: str = ""


def audit(task: Task, prompts: int = 64) -> Iterator[AuditFinding]:
    """Audit a task's verifier, in its workers, and its prompts; yield each finding as it is made.

    Args:
        task: its prompts are loaded, and its verifier is called some twenty times per tested prompt.
        prompts: the number of tested prompts, evenly spread over both splits.

    Yields:
        The findings in the order of a report; those of level `fault` must be fixed before a run.

    Raises:
        InputError: the prompts or the verifier cannot be loaded.
    """
    both = [*prompts_of(task, "heldout"), *prompts_of(task, "train")]
    at = np.linspace(0, len(both) - 1, min(prompts, len(both))).round().astype(int)
    with closing(_Judge(task)) as judge:
        yield from _of_verifier(judge, task, [both[i] for i in at])
    yield from _of_prompts(task)


# -- the verifier --------------------------------------------------------------------------------------------


class _Judge:
    """Verifies texts as a run does, within the limits of the task, and counts what fails."""

    def __init__(self, task: Task) -> None:
        self._task = task
        with in_one_line(f"task {type(task).__name__}: prepare() raised an error"):
            task.prepare()
        self._pool = None if is_trusted(task) else SupervisedVerifiers(task, task.limits)
        self.verified = 0
        self.failures: Counter[str] = Counter()
        self.example = ""

    def outcomes(self, pairs: _Pairs) -> list[Outcome]:
        if self._pool is None:
            found: list[Outcome] = [asdict(as_reward(self._task.verify(p, text))) for p, text in pairs]
        else:
            pending = self._pool.submit([job_of(p, [text]) for p, text in pairs])
            pending.wait(math.inf)
            found = pending.result()
        self.verified += len(pairs)
        for (prompt, text), outcome in zip(pairs, found, strict=True):
            if reason := outcome.get("failed"):
                self.failures[reason] += 1
                self.example = self.example or f"{prompt.id}, {brief(text)}: {outcome.get('detail', reason)}"
        return found

    def tried(self, check: str, pairs: _Pairs, right: bool) -> AuditFinding:
        """Return the finding on texts that should all be accepted, or all be rejected."""
        # A text whose verification failed is not accepted.
        accepted = [bool(outcome.get("correct")) for outcome in self.outcomes(pairs)]
        share = sum(accepted) / len(pairs)
        off = [f"{p.id}: {brief(t)}" for (p, t), ok in zip(pairs, accepted, strict=True) if ok != right]
        verdict = f"{share:.0%} accepted" if right else f"{1 - share:.0%} rejected"
        level: Level = "fault" if len(off) > TOLERATED * len(pairs) else "ok"
        return AuditFinding(check, f"{verdict} of {len(pairs)}", level, share, off[0] if off else "")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _of_verifier(judge: _Judge, task: Task, prompts: Sequence[Prompt]) -> Iterator[AuditFinding]:
    known = [(prompt, answer) for prompt in prompts if (answer := task.reference(prompt))]
    if not known:
        why = "the task has none, so that its verifier was not tried"
        yield AuditFinding("reference answers", why, "note")
        return
    forms = FORMS | (BLOCKS if any("\n" in answer for _, answer in known) else {})
    tried = {
        name: judge.tried(f"reference, {name}", [(p, form(a)) for p, a in known], True)
        for name, form in forms.items()
    }
    best = max(forms, key=lambda name: tried[name].share or 0.0)
    for name, finding in tried.items():  # one accepted form is enough: only the best one can be a fault
        yield finding if name == best else replace(finding, level="note")
    form = forms[best]
    yield from _right(judge, known, form)
    for check, pairs in _wrong(known, form):
        if pairs:
            yield judge.tried(check, pairs, False)
    pairs = [(prompt, form(answer)) for prompt, answer in known]
    yield _steady(judge, pairs)
    yield _speed(judge, pairs)
    result = ", ".join(f"{n} {reason}" for reason, n in judge.failures.items()) or "none"
    level: Level = "fault" if judge.failures else "ok"
    yield AuditFinding(
        "verifications that failed", f"{result} of {judge.verified}", level, example=judge.example
    )


def _right(judge: _Judge, known: _Pairs, form: Form) -> Iterator[AuditFinding]:
    """Yield findings on reference answers amid white space, and on whole numbers in other notations."""
    # A space before code of several lines would be a syntax error; an empty line is not.
    spaced = [(p, form(f"\n{a}\n" if "\n" in a else f" {a} ") + "\n") for p, a in known]
    yield judge.tried("reference among white space", spaced, True)
    whole = [(p, int(a)) for p, a in known if _WHOLE.fullmatch(a)]
    others = {
        "whole numbers as 7.0": [(p, form(f"{n}.0")) for p, n in whole],
        "whole numbers as 1,234": [(p, form(f"{n:,}")) for p, n in whole if abs(n) >= 1000],
    }
    for check, pairs in others.items():
        if pairs:
            yield replace(judge.tried(check, pairs, True), level="note")


def _wrong(known: _Pairs, form: Form) -> Iterator[tuple[str, _Pairs]]:
    """Yield answers to be rejected: another prompt's, hedged, lists, cut, the prompt, none, empty phrases."""
    answers = list(dict.fromkeys(answer for _, answer in known))
    others = {answer: answers[i - 1] for i, answer in enumerate(answers)}
    if len(answers) > 1:
        yield "answers of other prompts", [(p, form(others[a])) for p, a in known]
        yield "hedged: right or wrong", [(p, form(f"{a} or {others[a]}")) for p, a in known]
        yield "hedged: wrong or right", [(p, form(f"{others[a]} or {a}")) for p, a in known]
    some = [one for one in answers if len(one) < 40][:40]
    if len(some) > 2:
        lists = [(p, form(", ".join([*(one for one in some if one != a), a]))) for p, a in known]
        yield "a list of many answers", lists
    cut = [(p, text[: text.rindex(a) + len(a) // 2]) for p, a in known if len(a) > 1 and (text := form(a))]
    yield "cut in the middle of the answer", cut
    yield "the prompt, echoed", [(p, p.text) for p, _ in known]
    for text in _EMPTY:
        yield f"{text!r}" if text else "nothing", [(p, text) for p, _ in known]


def _steady(judge: _Judge, pairs: _Pairs) -> AuditFinding:
    # Compare only verdicts: an outcome also says whether its worker was replaced, as happens now and then.
    keys = ("value", "correct", "failed")
    first, again = ([[one.get(key) for key in keys] for one in judge.outcomes(pairs)] for _ in range(2))
    other = [p.id for (p, _), a, b in zip(pairs, first, again, strict=True) if a != b]
    return _counted("judged twice, differently", other, len(pairs), "fault")


def _speed(judge: _Judge, pairs: _Pairs) -> AuditFinding:
    took = []
    for pair in pairs:
        started = time.perf_counter()
        judge.outcomes([pair])
        took.append(1e3 * (time.perf_counter() - started))
    half, most = np.percentile(took, [50, 99])
    level: Level = "note" if most > _SLOW_MS else "ok"
    return AuditFinding("time of one", f"p50 {half:.3g} ms, p99 {most:.3g} ms", level)


# -- the prompts ---------------------------------------------------------------------------------------------


def _of_prompts(task: Task) -> Iterator[AuditFinding]:
    heldout, train = prompts_of(task, "heldout"), prompts_of(task, "train")
    sizes = np.array([len(prompt.text) for prompt in (*heldout, *train)])
    half, most = np.percentile(sizes, [50, 99])
    lengths = f"p50 {half:.0f}, p99 {most:.0f}, at most {sizes.max()} characters"
    yield AuditFinding("prompts", f"{len(train)} to train on, {len(heldout)} held out; {lengths}", "ok")
    known = Counter(_plain(prompt) for prompt in train)
    again = [brief(text) for text, n in known.items() for _ in range(n - 1)]
    yield _counted("training prompts given twice", again, len(train), "note")
    both = [prompt.id for prompt in heldout if _plain(prompt) in known]
    yield _counted("held-out prompts trained on", both, len(heldout), "fault")
    check = f"held-out prompts that share {N_GRAM} words"
    yield _counted(check, _overlaps(heldout, train), len(heldout), "note")
    long = [(p, a) for p in (*heldout, *train) if (a := task.reference(p)) and len(a) >= _LONG_ANSWER]
    in_prompt = [prompt.id for prompt, answer in long if answer.casefold() in prompt.text.casefold()]
    if long:
        check = f"answers of {_LONG_ANSWER} letters or more in the prompt"
        yield _counted(check, in_prompt, len(long), "note")


def _counted(check: str, found: Sequence[str], of: int, level: Level) -> AuditFinding:
    n = len(found)
    return AuditFinding(check, f"{n} of {of}", level if n else "ok", n / max(of, 1), found[0] if n else "")


def _plain(prompt: Prompt) -> str:
    return " ".join(prompt.text.casefold().split())


def _overlaps(heldout: Sequence[Prompt], train: Sequence[Prompt]) -> list[str]:
    """Return held-out prompts that share `N_GRAM` words in a row with a training prompt, each as `ID and ID`.

    Words that many training prompts share belong to a template, and do not count.
    """
    where: dict[int, str] = {}
    count: Counter[int] = Counter()
    for prompt in train:
        for gram in set(_grams(prompt)):
            where.setdefault(gram, prompt.id)
            count[gram] += 1
    most = max(_COMMON * len(train), 1)
    found = []
    for prompt in heldout:
        shared = next((gram for gram in _grams(prompt) if 0 < count[gram] <= most), None)
        if shared is not None:
            found.append(f"{prompt.id} and {where[shared]}")
    return found


def _grams(prompt: Prompt) -> list[int]:
    words = _plain(prompt).split()
    grams = [tuple(words[i : i + N_GRAM]) for i in range(len(words) - N_GRAM + 1)]
    return [hash(gram) for gram in grams if len(set(gram)) > N_GRAM // 2]  # not dots, or one word repeated
