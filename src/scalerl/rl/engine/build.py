"""The generator of a recipe, checked against the model, the tokenizer and the memory.

Before a run, log-probabilities of a few sampled tokens are compared with the model's own forward pass, and
that pass is compared in evaluation and training mode. Models differ in scales or soft caps of the logits, in
their positions, in their cache, and in what is random in training. If generator or trainer computed something
else, the run would silently train another model than the one it saves.

Shapes in names: T tokens of prompt and completion, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from scalerl.errors import InputError, brief, first_line
from scalerl.rl.algo.length import LengthRule
from scalerl.rl.config.engine import BuiltInEngine
from scalerl.rl.config.memory import RoleMemory, generator_memory
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.kernels.dense import attends_to_all
from scalerl.rl.model.causal_lm import (
    answer_tokens,
    end_tokens,
    hidden_states,
    load_tokenizer,
    model_of,
    prompt_tokens,
    stop_tokens,
    unknown_word,
)
from scalerl.rl.model.out_of_memory import is_out_of_memory, within_memory
from scalerl.rl.model.shape import shape_of
from scalerl.rl.tasks.task import Task, check_task, checked_prompts
from scalerl.rl.types import Prompt, Rollout
from scalerl.rl.verify.environment import load_environment

_SAMPLES, _TOKENS = 4, 3  # completions, and tokens of thinking and of answer each
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_LOW = 0.5  # nats, on average: a missing scale or cap differs by more, 16-bit rounding by less


def check_sampling(model: nn.Module, tokenizer: Any, sampling: Sampling, name: str) -> None:
    """Sample a few tokens and check their log-probabilities against the model's own forward pass.

    Raises an InputError if they differ, or if the model does not run with the generator's cache."""
    rule = sampling.length
    short = LengthRule(min(rule.thinking, _TOKENS), min(rule.answer, _TOKENS), rule.end_of_thinking)
    text = tokenizer.decode(list(rule.end_of_thinking.tokens))  # a text whose tokens it certainly has
    longest = len(tokenizer(text)["input_ids"])
    generator = TorchGenerator(
        model,
        tokenizer,
        replace(sampling, length=short, max_prompt_tokens=longest, experts=False, top_p=1.0, top_k=0),
        n_slots=2,
    )
    try:
        generator.submit(Prompt("probe", text, ""), 0, _SAMPLES)
        ((*rollouts,),) = generator.collect(1)
        gap = float(np.mean([_gap(model, rollout, sampling.temperature) for rollout in rollouts]))
    except (ValueError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"model {name} does not run in the generator ({first_line(error)})") from error
    allowed = _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_LOW) / min(sampling.temperature, 1.0)
    # `not <=`, so that NaN is rejected too.
    if not gap <= allowed:
        raise InputError(
            f"model {name} is sampled wrongly: log-probabilities are {gap:.2g} off those of its own forward "
            "pass (logits that are scaled or capped after the LM head are not supported yet)"
        )


@torch.no_grad()
def check_training(model: Any, name: str) -> None:
    """Raise an InputError if the model computes something else in training mode than in evaluation mode.

    Causes are dropout that cannot be turned off and router noise."""
    token_1T = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.vocab_size
    sampled_1TD = hidden_states(model.eval(), input_ids=token_1T, use_cache=False)
    trained_1TD = hidden_states(model.train(), input_ids=token_1T, use_cache=False)
    if not torch.allclose(sampled_1TD, trained_1TD, rtol=1e-3, atol=1e-3):
        raise InputError(
            f"model {name} computes something else while it is trained (dropout or router noise): set that "
            "to 0 in its config.json"
        )


@torch.no_grad()
def _gap(model: Any, rollout: Rollout, temperature: float) -> float:
    """Return the mean absolute difference of recorded log-probabilities from the model's own, in nats."""
    token_T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))
    token_T = token_T.to(next(model.parameters()).device)
    logits_TV = model(input_ids=token_T[None], use_cache=False).logits[0, :-1].float() / temperature
    logp_T = torch.log_softmax(logits_TV, -1).gather(-1, token_T[1:, None])[:, 0].cpu().numpy()
    return float(np.abs(logp_T[len(rollout.prompt_T) - 1 :] - rollout.logp_T).mean())


_LOG = logging.getLogger("scalerl")


def load_generator(
    recipe: Recipe, model_folder: str | Path, seed: int, n_slots: int, role: str = "generator"
) -> TorchGenerator:
    """Load the generator of a recipe, for training or the `role` evaluation; check tokens sampled by it."""

    def load() -> TorchGenerator:
        model, tokenizer = model_of(recipe, model_folder), load_tokenizer(model_folder)
        sampling = sampling_of(recipe, model, tokenizer, seed)
        check_sampling(model, tokenizer, sampling, recipe.model)
        if role != "generator":  # only training needs the recorded experts
            sampling = replace(sampling, experts=False)
        # An evaluator loads the environment of each task that it evaluates.
        environment = load_environment(recipe, tokenizer) if role == "generator" else None
        return TorchGenerator(model, tokenizer, sampling, n_slots, memory=memory, environment=environment)

    def memory() -> RoleMemory:
        return generator_memory(recipe, shape_of(recipe, model_folder), n_slots, role)

    return within_memory(load, role, memory)


def sampling_of(recipe: Recipe, model: nn.Module, tokenizer: Any, seed: int) -> Sampling:
    """Return how completions are sampled from this model.

    Raises:
        InputError: model or tokenizer do not fit the recipe.
    """
    config: Any = model.config
    if not attends_to_all(config):  # the generator's cache would sample it wrongly
        raise InputError(
            f"model {recipe.model} uses sliding-window or other attention that is not full: not supported yet"
        )
    length = LengthRule.resolve(
        recipe.length, tokenizer, recipe.context.thinking, recipe.context.answer, recipe.end_of_thinking
    )
    needed = recipe.context.prompt + length.max_tokens
    if needed > config.max_position_embeddings:
        raise InputError(
            f"context: prompt, thinking, phrase and answer need {needed} positions, and the model has "
            f"{config.max_position_embeddings}"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer of {recipe.model} has no end token (eos_token)")
    return Sampling(
        recipe.temperature,
        recipe.fp32_head("generator"),
        seed,
        recipe.context.prompt,
        length,
        tokenizer.eos_token_id,
        recipe.engine.kind if isinstance(recipe.engine, BuiltInEngine) else "auto",
        (*end_tokens(tokenizer)[1:], *stop_tokens(tokenizer, recipe.stop)),
        recipe.routing_replay,
        recipe.top_p,
        recipe.top_k,
    )


def check_sampler(recipe: Recipe, model_folder: str | Path, model: nn.Module) -> tuple[Any, Sampling]:
    """Check that `model` can be sampled from; return tokenizer and sampling settings."""
    tokenizer = load_tokenizer(model_folder)
    return tokenizer, sampling_of(recipe, model, tokenizer, recipe.seed)


def check_prompts(recipe: Recipe, model_folder: str | Path) -> Recipe:
    """Return the recipe, without prompts longer than `context.prompt` if its tasks drop those.

    A warning is logged for prompts of a downstream suite that are trained on, and for held-out prompts whose
    right answers would be truncated.

    Raises:
        InputError: `check_task` rejects the prompts; one has no tokens, or a word that the tokenizer does not
            know; or some are too long, and the task does not drop them.
    """
    tokenizer, task, most = load_tokenizer(model_folder), recipe.task, recipe.context.prompt
    check_task(task)
    train = task.prompts("train")
    kept = _check_lengths(tokenizer, task, [*task.prompts("heldout"), *train], most)
    _check_answers(tokenizer, recipe)
    suites, trained = recipe.evaluation.downstream, {prompt.asked for prompt in train}
    checked = []
    for suite in suites:
        prompts = checked_prompts(suite.task, "heldout", f"suite {suite.name}")
        if leaked := sum(prompt.asked in trained for prompt in prompts):
            text = (
                "evaluation.downstream: %d of %d prompts of %r are trained on: it measures no more than that"
            )
            _LOG.warning(text, leaked, len(prompts), suite.name)
        checked.append(replace(suite, task=_check_lengths(tokenizer, suite.task, prompts, most, suite.name)))
    if kept is task and all(new.task is old.task for new, old in zip(checked, suites, strict=True)):
        return recipe
    return replace(recipe, task=kept, evaluation=replace(recipe.evaluation, downstream=tuple(checked)))


def _check_lengths(tokenizer: Any, task: Task, prompts: Sequence[Prompt], most: int, suite: str = "") -> Task:
    """Return the task of the run, or of a `suite`, without its prompts of more than `most` tokens."""
    of = f"suite {suite}: " if suite else ""
    lengths: dict[str, int] = {}
    for prompt in prompts:
        token_T = prompt_tokens(tokenizer, prompt)
        lengths[prompt.id] = len(token_T)
        if (word := unknown_word(tokenizer, prompt, token_T)) is not None:
            few = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) if len(tokenizer) < 50 else []
            knows = f"; it knows {' '.join(few)}" * bool(few)
            raise InputError(f"{of}prompt {prompt.id}: the tokenizer does not know {brief(word)}{knows}")
    if empty := [name for name, length in lengths.items() if not length]:
        raise InputError(
            f"{of}prompt {empty[0]} has no tokens ({len(empty)} of {len(prompts)} prompts have none)"
        )
    if task.turns > 1 and (chats := [prompt for prompt in prompts if prompt.messages is not None]):
        answer_tokens(tokenizer, chats[0], ["?"])  # raises if the chat template has no tool messages
    long = [name for name, length in lengths.items() if length > most]
    if not long:
        return task
    if (kept := task.without(frozenset(long))) is not None:
        return kept
    allowed = f"{of}context.prompt: {most} tokens are allowed, and prompt {long[0]} has"
    how = "; task.too_long = 'drop' leaves them out" if hasattr(task, "too_long") else ""
    raise InputError(
        f"{allowed} {lengths[long[0]]} ({len(long)} of {len(prompts)} prompts are too long{how})"
    )


def _check_answers(tokenizer: Any, recipe: Recipe) -> None:
    """Warn if known right answers of held-out prompts are longer than the answer that is sampled."""
    task, prompts = recipe.task, recipe.task.prompts("heldout")
    name, most = "context.answer", recipe.context.answer
    if recipe.length.interruption() is None:  # an answer may take what the thinking leaves
        name, most = "context", recipe.context.sampled
    answers = {prompt.id: task.reference(prompt) for prompt in prompts} if task.turns == 1 else {}
    lengths = {id: _answer_length(tokenizer, text) for id, text in answers.items() if text}
    if long := [id for id, length in lengths.items() if length > most]:
        _LOG.warning(
            "%s: %d tokens are sampled of an answer, and that of prompt %s takes %d with its end token; "
            "%d of %d held-out prompts have such answers, which are cut and count as wrong",
            *(name, most, long[0], lengths[long[0]], len(long), len(prompts)),
        )


def _answer_length(tokenizer: Any, text: str) -> int:
    token_T = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    # A tokenizer with few words spells an unknown word, one token a letter.
    is_spelt = unknown_word(tokenizer, Prompt("answer", text, text), token_T) is not None
    return 1 + (len("".join(text.split())) if is_spelt else len(token_T))
