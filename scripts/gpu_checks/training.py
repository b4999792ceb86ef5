"""Speed, MFU and peak memory of a trainer step.

Shapes in names: T tokens of a completion.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_checks.lab import Lab
from scalerl.model_config import ModelShape
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import TokenAverage
from scalerl.rl.config.memory import trainer_memory
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.learner.batch import Batch, make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.sharding import compile_blocks
from scalerl.rl.model.causal_lm import FlopCount
from scalerl.rl.types import Group, Prompt, Reward, Rollout

MICRO = (1, 4, 16, 32)
"""Completions of a forward pass."""


def step(lab: Lab) -> dict[str, Any]:
    """Steps of 32 completions of 512 tokens, by completions of a forward pass, and with compiled layers; the
    peak of memory beside what `--dry-run` says of it.

    The time to compile is that of the first step, which is not counted.
    """
    model = lab.model(tied=True)
    completions, tokens = lab.size(32, 8), lab.size(512, 16)
    batch = batch_of(completions, tokens, model.config.vocab_size)
    read = tokens - 1.0  # the last token is predicted, never read
    flops = 3 * FlopCount.of(model).forward(completions * read, completions * read * (read + 1) / 2)
    peak_rate, shape = lab.flops_per_second(), ModelShape.of(model.config.to_dict(), "random")
    lengths = [f"context.prompt={tokens // 4}", f"context.thinking={tokens - tokens // 4 - 1}"]
    lengths += ["context.answer=1", "length.kind=none", "precision=bfloat16"]
    figures: dict[str, Any] = {"bf16_tflops": peak_rate / 1e12}
    rows = {f"micro_{micro}": [f"batch.micro={micro}"] for micro in MICRO}
    rows["compiled"] = [f"batch.micro={MICRO[-1]}", "learner.compile=true"]
    for row, settings in rows.items():
        recipe = load_recipe("demo", [*lengths, *settings])
        if recipe.learner.compile:
            compile_blocks(model, "eager" if lab.tiny else "inductor")
        learner = Learner(model, recipe)
        lab.forget_peak()
        took = lab.best_seconds(lambda learner=learner: learner.step(batch), times=3)
        figures[row] = {
            "tokens_per_second": int(batch.sampled_NT.sum()) / took,
            "mfu": flops / took / peak_rate,
            "peak_gib": lab.peak_gib(),
            "formula_gib": trainer_memory(recipe, shape).total / 2**30,
        }
        del learner
    assert max(figures[row]["mfu"] for row in rows) > 0
    return figures


def batch_of(completions: int, tokens: int, vocabulary: int) -> Batch:
    """Return one group of random completions after a prompt of a quarter of their tokens, half right."""
    rng, start = np.random.default_rng(0), tokens // 4
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
        for sample in range(completions)
    ]
    group = Group.of(rollouts, [Reward(1.0 - 2.0 * (n % 2), n % 2 == 0) for n in range(completions)])
    return make_batch([group], BatchStd(), TokenAverage(), tokens)
