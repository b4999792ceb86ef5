"""How fast are decoding and a trainer step on SmolLM2-135M, beside transformers' `generate` and TRL?

    scalerl model smollm2
    python benchmarks/smollm2_speed.py decode [--repeats 3] [--threads 1]
    python benchmarks/smollm2_speed.py step [--repeats 3] [--threads 1]
    python benchmarks/smollm2_speed.py bfloat16 [--repeats 3] [--threads 2]

Eight prompts of reasoning-gym's chain_sum as chats, four completions of each, whose lengths are given: drawn
log-uniform from 16 to 256 tokens (`mixed`), or all their mean (`equal`). Both sides sample the same number of
tokens, at temperature 1 in float32; the end token is forced at a completion's last position and nowhere else.

`decode` is from the texts of the prompts to the tokens, by our generator (32 slots) and by `generate`, which
goes on with the whole batch until its longest completion ends. `step` is forward, backward, clipping and
AdamW on these completions, by `Learner.step` and by TRL's GRPOTrainer (1.16, CISPO, no reference model; its
`training_step` and its optimiser), in micro-batches of eight completions on both sides.

The floor is the time of the bare matrix products in float32, of every token that must be read once: prompts
once for each group, no padding, logits of sampled tokens alone; in a step three products for each.
The sides take turns, and ratios are within a turn; CPU time with one thread, wall time with more.

`bfloat16` has no other side: our decoding and our step in float32 and in bfloat16 (`precision`), 16 tokens a
completion, with one thread and up to as many as are named, by the CPU time of all threads and the wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import dtype_of, load_model, load_tokenizer, prompt_tokens
from scalerl.rl.model.named import find_model
from scalerl.rl.types import Group, Prompt, Rollout

PROMPTS, SAMPLES, MICRO = 8, 4, 8
SHORTEST, LONGEST = 16, 256
OTHER = 28
"""Token that replaces an end token sampled too early."""
Call = Callable[[], None]


class ForcedGenerator(TorchGenerator):
    """Our generator with the length of each completion given, by prompt and sample."""

    length_PG: np.ndarray

    def _sample(
        self, logp_AV: torch.Tensor, slots: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        token_A, logp_A = super()._sample(logp_AV, slots, at)
        requests = [self._slots.requests[slot] for slot in slots.tolist()]
        length_A = np.array([self.length_PG[r.seq_no % PROMPTS, r.sample] for r in requests])
        end = self.sampling.end_token
        token_A = np.where(token_A == end, OTHER, token_A)
        return np.where(at - self._slots.start_S[slots] == length_A - 1, end, token_A), logp_A


def our_decoder(
    folder: str, prompts: Sequence[Prompt], length_PG: np.ndarray, dtype: torch.dtype = torch.float32
) -> ForcedGenerator:
    model, tokenizer = load_model(folder, dtype), load_tokenizer(folder)
    end = tokenizer.eos_token_id
    longest = max(len(prompt_tokens(tokenizer, prompt)) for prompt in prompts)
    rule = LengthRule(LONGEST, 1, Marker((end,)))
    found = ForcedGenerator(model, tokenizer, Sampling(1.0, True, 0, longest, rule, end), length_PG.size)
    found.length_PG = length_PG
    return found


def decode_ours(generator: ForcedGenerator, prompts: Sequence[Prompt]) -> list[tuple[Rollout, ...]]:
    for prompt in prompts:
        generator.submit(prompt, 0, SAMPLES)
    groups = generator.collect(len(prompts))
    found = np.array([[rollout.length for rollout in group] for group in groups])
    assert (found == generator.length_PG).all()
    return groups


def their_decoder(folder: str, prompts: Sequence[Prompt], length_PG: np.ndarray) -> Call:
    from transformers import LogitsProcessor, LogitsProcessorList

    model: Any = load_model(folder, torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side, end = "left", tokenizer.eos_token_id
    chats = [
        [{"role": r, "content": c} for r, c in p.messages or ()] for p in prompts for _ in range(SAMPLES)
    ]
    length_B = torch.from_numpy(length_PG.ravel())

    class Forced(LogitsProcessor):
        def __init__(self, n_prompt: int) -> None:
            self.n_prompt = n_prompt

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last_B = length_B == input_ids.shape[1] - self.n_prompt + 1
            scores[:, end] = -torch.inf
            scores[last_B] = -torch.inf
            scores[last_B, end] = 0.0
            return scores

    def decode() -> None:
        how = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(chats, **how)
        n_prompt = inputs["input_ids"].shape[1]
        forced = LogitsProcessorList([Forced(n_prompt)])
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = model.generate(
                **inputs, **sampled, max_new_tokens=LONGEST, eos_token_id=end, logits_processor=forced
            )[:, n_prompt:]
        assert ((out == end).int().argmax(1) + 1 == length_B).all()

    return decode


def products(model: Any, passes: Sequence[tuple[int, int]], backward: bool) -> Call:
    """Return a call that does only the matrix products of passes of (tokens, tokens through the head)."""
    config = model.config
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * dim
    shapes = [(hidden, qkv), (config.num_attention_heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]
    # Separate matrices for every block, as those of a model do not fit the processor's cache.
    blocks = [torch.randn(n, k).t() for _ in range(config.num_hidden_layers) for k, n in shapes]
    head = torch.randn(config.vocab_size, hidden).t()

    @torch.inference_mode()
    def multiply() -> None:
        for n_tokens, n_logits in passes:
            for m, w in [*((n_tokens, w) for w in blocks), (n_logits, head)]:
                for start in range(0, m, 1024):
                    x = torch.empty(min(1024, m - start), len(w))
                    y = x @ w
                    if backward:
                        _ = y @ w.t(), y.t() @ x

    return multiply


def our_step(folder: str, recipe: Recipe, groups: Sequence[Group]) -> Call:
    learner = Learner(load_model(folder, dtype_of(recipe.precision)), recipe)
    batch = make_batch(groups, recipe.advantage, recipe.averaging, LONGEST, keep_truncated=True)
    assert len(batch) == PROMPTS * SAMPLES

    def step() -> None:
        learner.step(batch)

    return step


def their_step(folder: str, recipe: Recipe, groups: Sequence[Group]) -> Call:
    import logging

    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    logging.disable(logging.WARNING)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokenizer, n_micro = load_tokenizer(folder), len(rollouts) // MICRO
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=n_micro,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        loss_type="cispo",
        epsilon_high=5.0,
        beta=0.0,
        learning_rate=recipe.optimiser.lr,
        max_grad_norm=recipe.optimiser.max_grad_norm,
        report_to=[],
    )
    trainer: Any = GRPOTrainer(
        model=load_model(folder, torch.float32),  # pyright: ignore[reportArgumentType]
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * len(rollouts)),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = n_micro
    # As its `_prepare_inputs` returns them: padded over the whole batch, prompts on the left.
    prompt, completion = [r.prompt_T for r in rollouts], [r.token_T for r in rollouts]
    ids, masks = zip(padded(prompt, left=True), padded(completion, left=False), strict=True)
    inputs = {
        **{"prompt_ids": ids[0], "completion_ids": ids[1]},
        **{"prompt_mask": masks[0], "completion_mask": masks[1]},
        "advantages": torch.tensor([a for g in groups for a in g.reward_G.tolist()]),
    }
    n_tokens = masks[1].sum()
    parts = [
        {name: value[start : start + MICRO] for name, value in inputs.items()}
        for start in range(0, len(rollouts), MICRO)
    ]
    trainer._prepare_inputs = lambda part: part | {"num_items_in_batch": n_tokens}

    def step() -> None:
        trainer.model.train()
        for part in parts:
            trainer.training_step(trainer.model, part, None)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), config.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return step


def padded(rows: Sequence[np.ndarray], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens and their mask, (N, T) each."""
    token_NT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask_NT = torch.zeros_like(token_NT)
    for n, row in enumerate(rows):
        at = slice(-len(row), None) if left else slice(len(row))
        token_NT[n, at], mask_NT[n, at] = torch.from_numpy(row), 1
    return token_NT, mask_NT


def groups_of(prompts: Sequence[Prompt], tokenizer: Any, length_PG: np.ndarray) -> list[Group]:
    """Return completions of given lengths with random tokens, as their content does not affect speed."""
    rng, groups = np.random.default_rng(0), []
    for prompt, length_G in zip(prompts, length_PG, strict=True):
        prompt_T = prompt_tokens(tokenizer, prompt)
        rollouts = [
            Rollout(
                prompt=prompt,
                epoch=0,
                sample=sample,
                prompt_T=prompt_T,
                token_T=rng.integers(100, 40_000, n),
                sampled_T=np.ones(n, dtype=bool),
                logp_T=np.full(n, -10.0, dtype=np.float32),
                version_T=np.zeros(n, dtype=np.int32),
                first_version=0,
                truncated=False,
                interrupted=False,
            )
            for sample, n in enumerate(length_G)
        ]
        signs = np.arange(SAMPLES) % 2 == 0
        groups.append(Group(tuple(rollouts), np.where(signs, 1.0, -1.0), signs))
    return groups


def compare(name: str, tokens: int, calls: dict[str, Call], repeats: int, clock: Callable[[], float]) -> None:
    """Print a line: tokens/s of ours, theirs and the floor, and median ratios within a turn."""
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(repeats):
        for side, call in calls.items():
            started = clock()
            call()
            seconds[side].append(clock() - started)
            print(f"{name}, {side}: {seconds[side][-1]:.1f} s", file=sys.stderr, flush=True)
    ours, theirs, floor = (np.array(found) for found in seconds.values())
    rates = " | ".join(f"{tokens / statistics.median(found):.0f}" for found in (ours, theirs, floor))
    ratio = theirs / ours
    print(
        f"| {name} | {tokens} | {rates} | {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f}) "
        f"| {np.median(floor / ours):.0%} | {np.median(floor / theirs):.0%} |",
        flush=True,
    )


def compare_precisions(
    folder: str, recipe: Recipe, prompts: Sequence[Prompt], repeats: int, most_threads: int
) -> None:
    """Print a line each for decoding and a step, by threads: CPU seconds in both precisions, and ratios."""
    length_PG = np.full((PROMPTS, SAMPLES), 16)
    groups = groups_of(prompts, load_tokenizer(folder), length_PG)

    def decoding(precision: Any) -> Call:
        decoder = our_decoder(folder, prompts, length_PG, dtype_of(precision))
        return lambda: void(decode_ours(decoder, prompts))

    def a_step(precision: Any) -> Call:
        return our_step(folder, replace(recipe, precision=precision), groups)

    print(
        "| | threads | CPU s, float32 | bfloat16 | bfloat16 / float32 | of wall time |\n" + "|---" * 6 + "|"
    )
    for what, make in (("decoding", decoding), ("a step", a_step)):
        seconds: dict[tuple[str, int], np.ndarray] = {}
        for precision in ("float32", "bfloat16"):
            call = make(precision)  # one at a time: model, gradients and moments take 2 GB
            for threads in range(1, most_threads + 1):
                torch.set_num_threads(threads)
                measured_RC = np.array([seconds_of(call) for _ in range(repeats)])
                seconds[precision, threads] = np.median(measured_RC, axis=0)
                print(f"{what}, {precision}, {threads}: {measured_RC.tolist()}", file=sys.stderr, flush=True)
            del call
        for threads in range(1, most_threads + 1):
            full, half = seconds["float32", threads], seconds["bfloat16", threads]
            ratio = half / full
            print(f"| {what} | {threads} | {full[0]:.1f} | {half[0]:.1f} | {ratio[0]:.2f} | {ratio[1]:.2f} |")


def seconds_of(call: Call) -> tuple[float, float]:
    """Return the CPU seconds of a call, over all threads, and its wall-clock seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["decode", "step", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=["mixed", "equal"])
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    recipe = load_recipe("smollm2", ["task.chat_template=true", "task.question=", "task.template={prompt}"])
    recipe = replace(recipe, batch=replace(recipe.batch, prompts=PROMPTS, samples=SAMPLES, micro=MICRO))
    folder, _ = find_model(recipe)
    tokenizer, prompts = load_tokenizer(folder), recipe.task.prompts("train")[:PROMPTS]
    if args.job == "bfloat16":
        compare_precisions(folder, recipe, prompts, args.repeats, args.threads)
        return
    drawn = np.random.default_rng(0).uniform(np.log(SHORTEST), np.log(LONGEST), (PROMPTS, SAMPLES))
    mixed = np.exp(drawn).round().astype(int)
    by_name = {"mixed": mixed, "equal": np.full_like(mixed, round(mixed.mean()))}
    reads = [len(prompt_tokens(tokenizer, prompt)) for prompt in prompts]
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), load {load:.1f}, prompts of {min(reads)} to",
        end=" ",
    )
    print(f"{max(reads)} tokens; tokens/s\n")
    print("| lengths | tokens | ours | theirs | floor | ours / theirs | ours of the floor | theirs of it |")
    print("|---" * 8 + "|")
    for name in args.lengths:
        length_PG = by_name[name]
        if args.job == "decode":
            generator = our_decoder(folder, prompts, length_PG)
            first = sum(reads), length_PG.size
            n_T = [int((length_PG > t).sum()) for t in range(1, length_PG.max())]
            calls = {
                "ours": lambda generator=generator: void(decode_ours(generator, prompts)),
                "theirs": their_decoder(folder, prompts, length_PG),
                "floor": products(generator.model, [first, *[(n, n) for n in n_T]], False),
            }
        else:
            groups, model = groups_of(prompts, tokenizer, length_PG), load_model(folder, torch.float32)
            own = [sum(reads[i : i + 2]) + length_PG[i : i + 2].sum() for i in range(0, PROMPTS, 2)]
            logits = [length_PG[i : i + 2].sum() for i in range(0, PROMPTS, 2)]
            calls = {
                "ours": our_step(folder, recipe, groups),
                "theirs": their_step(folder, recipe, groups),
                "floor": products(model, list(zip(own, logits, strict=True)), True),
            }
        compare(name, int(length_PG.sum()), calls, args.repeats, clock)


def void(value: object) -> None:
    """Discard a result."""


if __name__ == "__main__":
    main()
