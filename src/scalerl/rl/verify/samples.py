"""Completions kept as text, for people: the lines of samples.jsonl."""

from collections.abc import Sequence
from typing import Any

from scalerl.rl.types import Group, Reward, Rollout
from scalerl.rl.verify.verifier import texts_of


def sample_row(source: str, step: int, rollout: Rollout, reward: Reward, tokenizer: Any) -> dict[str, Any]:
    """Return a line of samples.jsonl; docs/reference/run-folder.md has its fields.

    Args:
        source: "evaluation" or "training".
        step: the evaluation's, or the trainer step that consumed the completion.
        rollout: the completion.
        reward: its reward.
        tokenizer: decodes its tokens all at once, as one token may be only a part of a character.
    """
    finish = "truncated" if rollout.truncated else "interrupted" if rollout.interrupted else "ended"
    return {
        "source": source,
        "step": step,
        "prompt": rollout.prompt.id,
        "epoch": rollout.epoch,
        "sample": rollout.sample,
        "prompt_text": tokenizer.decode(rollout.prompt_T.tolist()),
        "completion": texts_of(tokenizer, [(rollout.prompt, [rollout.token_T])])[0][0],
        "reward": reward.value,
        "correct": bool(reward.correct),
        "finish": finish,
        "versions": [int(rollout.version_T[0]), int(rollout.version_T[-1])],
        "length": rollout.length,
    }


def training_samples(step: int, groups: Sequence[Group], tokenizer: Any) -> list[dict[str, Any]]:
    """Return a line for the first completion of each of `groups`, which a step has consumed."""
    pairs = [(group.rollouts[0], Reward(float(group.reward_G[0]), group.correct_G[0])) for group in groups]
    return [sample_row("training", step, rollout, reward, tokenizer) for rollout, reward in pairs]


def spread_over(n_prompts: int, n: int) -> list[int]:
    """Return `n` indices spread evenly over those of the prompts; all of them if there are fewer."""
    n = min(n, n_prompts)
    return [i * n_prompts // n for i in range(n)]
