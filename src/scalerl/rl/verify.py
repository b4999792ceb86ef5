"""Verification that cannot hurt the run.

    rollouts -> text -> worker processes -> rewards, in order

A verifier is code of others on text that a model wrote. It runs in processes of its own, each with a limit of
time and memory. What it does to itself costs one completion, and its process if need be, and is counted:

    raised     it raised an exception
    timeout    it was not done within the time limit (in a loop in C, say): its process is killed
    nonsense   it returned no reward, or one that is not finite
    died       its process died, or ran out of memory

Such a completion gets the reward of a failure, and leaves the loss as a truncated one does.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scalerl.rl.types import FAILED, Limits, Reward, Rollout, Task
from scalerl.rl.workers import Workers


class Verifier:
    """Judges rollouts: a truncated one has failed, whatever it says; the task judges the others' text.

    Without `limits` the task judges in this process, which is right for one that is quick and pure; it then
    gets the text with its end token, and with `limits` without.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, tokenizer: Any, limits: Limits | None = None) -> None:
        self.failures: Counter[str] = Counter()
        """Verifications that failed, by reason."""
        self.examples: dict[str, str] = {}
        """The first failure of each reason: prompt and message."""
        self._told: set[str] = set()
        self._task, self._tokenizer = task, tokenizer
        self._workers = Workers(task, limits) if limits else None
        if self._workers:
            self._close = weakref.finalize(self, self._workers.close)

    def judge(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Reward]]:
        """The rewards of the completions of each group, in order."""
        rollouts = [rollout for group in groups for rollout in group if not rollout.truncated]
        rewards = iter((self._judge_aside if self._workers else self._judge_here)(rollouts))
        return [[FAILED if rollout.truncated else next(rewards) for rollout in group] for group in groups]

    def new_failures(self) -> list[str]:
        """A line for every reason that has shown since the last call: what failed first."""
        new = {reason: text for reason, text in self.examples.items() if reason not in self._told}
        self._told |= new.keys()
        return [f"a verification failed ({reason}) at prompt {text}" for reason, text in new.items()]

    def close(self) -> None:
        """End the processes."""
        if self._workers:
            self._close()

    def _judge_here(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        if not rollouts:  # which a tokenizer takes for one empty text
            return []
        texts = self._tokenizer.batch_decode([rollout.token_T.tolist() for rollout in rollouts])
        return [self._task.verify(rollout.prompt, t) for rollout, t in zip(rollouts, texts, strict=True)]

    def _judge_aside(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        assert self._workers is not None
        jobs = [json.dumps([asdict(r.prompt), self._text(r)]).encode() for r in rollouts]
        return [
            self._reward(rollout, outcome)
            for rollout, outcome in zip(rollouts, self._workers.run(jobs), strict=True)
        ]

    def _text(self, rollout: Rollout) -> str:
        token_T = rollout.token_T
        ended = len(token_T) and token_T[-1] == self._tokenizer.eos_token_id
        return self._tokenizer.decode(token_T[:-1] if ended else token_T)

    def _reward(self, rollout: Rollout, outcome: dict[str, Any]) -> Reward:
        reason = outcome.get("failed")
        if reason is None:
            return Reward(outcome["value"], outcome["correct"])
        self.failures[reason] += 1
        self.examples.setdefault(reason, f"{rollout.prompt.id}: {outcome.get('detail', reason)}")
        return Reward(FAILED.value, FAILED.correct, reason)
