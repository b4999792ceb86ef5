"""Speed, MFU and peak memory of a trainer step, and whether compiled layers agree with the others.

Shapes in names: N completions, T tokens of a completion, prompt included.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from gpu_checks.lab import Lab
from scalerl.model_config import ModelShape
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import TokenAverage
from scalerl.rl.config.memory import trainer_memory
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.learner import load
from scalerl.rl.learner.batch import Batch, StepStats, make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.sharding import compile_blocks
from scalerl.rl.model.causal_lm import FlopCount
from scalerl.rl.types import Group, Prompt, Reward, Rollout
from scalerl.rl.workers.ranks import meet

_WHOLE = "batch.micro=32"
_COMPILED = (_WHOLE, "learner.compile=true")
SHARDED = "sharded"
ROWS = {
    "padded": (_WHOLE, "learner.attention=sdpa"),
    **{f"micro_{micro}": (f"batch.micro={micro}",) for micro in (1, 4, 16, 32)},
    "compiled": _COMPILED,
    "checkpointed": (*_COMPILED, "learner.activation_checkpointing=true"),
    SHARDED: _COMPILED,
}
"""Changes to the recipe; the other rows are compared with the first."""
# Room for bf16 rounding, as each row computes in a different order. If tokens attended to another completion,
# log-probabilities would be off by their own spread, which is .25.
_LIMITS = {"logps_differ": 0.02, "losses_differ": 5e-3, "gradients_differ": 0.05}


def step(lab: Lab) -> dict[str, Any]:
    """Time steps of 32 completions of 512 tokens with the learner of `scalerl train`, once per row of `ROWS`.

    Rows differ in completions per forward pass, compilation, activation checkpointing and FSDP2 on one rank.
    The peak of memory is reported beside the estimate of `--dry-run`.

    Before it is timed, each row steps on that batch and on two shorter ones of uneven lengths, which includes
    compilation. These steps must match the log-probabilities, losses and gradients of the first row, and no
    function may reach PyTorch's limit of recompilations.
    """
    folder, completions, tokens = lab.folder / "model", lab.size(32, 8), lab.size(512, 16)
    # At this spread uniformly drawn tokens are not too unlikely, although a tied model favours the last one.
    model = lab.model(tied=True, spread=0.25)
    model.save_pretrained(folder)
    shape, count = ModelShape.of(model.config.to_dict(), "random"), FlopCount.of(model)
    vocabulary = model.config.vocab_size
    del model
    batches = [batch_of(completions, tokens, vocabulary)]
    batches += [uneven_batch_of(completions, part * tokens // 4, vocabulary) for part in (3, 2)]
    read_N = batches[0].length_N - 1.0  # the last token is predicted, never read
    flops = 3 * count.forward(read_N.sum(), (read_N * (read_N + 1) / 2).sum())
    peak_rate = lab.flops_per_second()
    figures: dict[str, Any] = {"bf16_tflops": peak_rate / 1e12}
    settings = [f"context.prompt={tokens // 4}", f"context.thinking={tokens - tokens // 4 - 1}"]
    settings += ["context.answer=1", "length.kind=none", "precision=bfloat16", "optimiser.lr=1e-6"]
    expected, faults = [], []
    for row, changes in ROWS.items():
        recipe = load_recipe("demo", [*settings, *changes])
        with _compiling(lab), _one_rank(lab, row == SHARDED):
            lab.forget_peak()
            learner = load_learner(recipe, folder)
            if not expected:  # then importance ratios are 1, except for rounding and two small steps
                batches = [_sampled_by(learner, batch) for batch in batches]
            try:
                steps = [learner.step(batch) for batch in batches]
            except FailOnRecompileLimitHit as error:
                faults.append(f"{row}: {error}")
                continue
            expected = expected or steps
            took = min(lab.seconds(partial(learner.step, batches[0])) for _ in range(2))
            found = figures[row] = {
                "tokens_per_second": int(batches[0].sampled_NT.sum()) / took,
                "mfu": float(flops / took / peak_rate),
                "peak_gib": lab.peak_gib(),
                "packed": learner.score.packed,
                "graphs": counters["stats"]["unique_graphs"],
                **_apart(steps, expected),
            }
            del learner
        if row != SHARDED:  # the formula does not cover sharding over one rank
            found["formula_gib"] = trainer_memory(recipe, shape).total / 2**30
        faults += [f"{row}: {fault}" for fault in _faults(lab, recipe, found)]
    # Report the faults of all rows at once, as GPU time is expensive.
    assert not faults, (faults, figures)
    return figures


def _apart(steps: Sequence[StepStats], expected: Sequence[StepStats]) -> dict[str, float]:
    pairs = list(zip(steps, expected, strict=True))
    return {
        "logps_differ": max(stats.logp_shift for stats in steps),
        "losses_differ": max(abs(stats.loss - other.loss) for stats, other in pairs),
        "gradients_differ": max(abs(stats.grad_norm / other.grad_norm - 1) for stats, other in pairs),
    }


def _faults(lab: Lab, recipe: Recipe, found: dict[str, Any]) -> Iterator[str]:
    for name, limit in _LIMITS.items():
        if not found[name] <= limit:  # also NaN
            yield f"{name} is {found[name]}, at most {limit} is allowed"
    if recipe.learner.compile and not found["graphs"]:
        yield "nothing was compiled"
    if recipe.learner.attention == "auto" and lab.device.type == "cuda" and not found["packed"]:
        yield "completions were padded: PyTorch's attention of packed sequences did not work here"


@torch.no_grad()
def _sampled_by(learner: Learner, batch: Batch) -> Batch:
    """Return the batch with the learner's own log-probabilities in place of those recorded."""
    logp_NT = batch.behaviour_logp_NT.copy()
    for n in range(len(batch)):
        one = slice(n, n + 1)
        logp_1T, _ = learner.score(batch.token_NT[one], batch.sampled_NT[one, 1:])
        logp_NT[one, 1:] = logp_1T.cpu().numpy()
    return replace(batch, behaviour_logp_NT=logp_NT)


@contextmanager
def _compiling(lab: Lab) -> Iterator[None]:
    """Start with nothing compiled, and raise at PyTorch's limit of recompilations of a function.

    In a tiny check the graphs are captured, but no code is generated.
    """
    torch._dynamo.reset()
    counters.clear()
    gc.collect()  # a compiled block refers to itself, and so keeps the previous learner alive
    how = partial(compile_blocks, backend="eager" if lab.tiny else "inductor")
    dynamo: Any = torch._dynamo.config
    with mock.patch.object(load, "compile_blocks", how), dynamo.patch(fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def _one_rank(lab: Lab, wanted: bool) -> Iterator[None]:
    """If `wanted`, make a process group of this process alone, over which a learner is sharded."""
    if not wanted:
        yield
        return
    meet(60, init_method=f"file://{lab.folder / 'ranks'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def batch_of(completions: int, tokens: int, vocabulary: int) -> Batch:
    """Return one group of random completions, half of them right; a quarter of their tokens is the prompt."""
    return _batch([tokens] * completions, tokens // 4, vocabulary)


def uneven_batch_of(completions: int, tokens: int, vocabulary: int) -> Batch:
    """Return such a batch whose completions range from half of `tokens` to all of them."""
    length_N = np.linspace(tokens // 2, tokens, completions).astype(int).tolist()
    return _batch(length_N, tokens // 4, vocabulary)


def _batch(length_N: Sequence[int], start: int, vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)
    prompt_T = rng.integers(0, vocabulary, start)
    rollouts = [
        Rollout(
            prompt=Prompt("p", "", ""),
            epoch=0,
            sample=sample,
            prompt_T=prompt_T,
            token_T=rng.integers(0, vocabulary, tokens - start),
            sampled_T=np.ones(tokens - start, dtype=bool),
            logp_T=np.full(tokens - start, -np.log(vocabulary), dtype=np.float32),
            version_T=np.zeros(tokens - start, dtype=np.int32),
            first_version=0,
            truncated=False,
            interrupted=False,
        )
        for sample, tokens in enumerate(length_N)
    ]
    group = Group.of(rollouts, [Reward(1.0 - 2.0 * (n % 2), n % 2 == 0) for n in range(len(length_N))])
    return make_batch([group], BatchStd(), TokenAverage(), max(length_N))
