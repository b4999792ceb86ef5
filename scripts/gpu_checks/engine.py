"""Log-probabilities, replay across weight updates, decoding speed.

Shapes in names: T tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gpu_checks.lab import Lab, within
from random_model import END_TOKEN, chain_tokenizer
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.model.causal_lm import cache_argument, hidden_states, log_probs_TV
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.types import Prompt, Rollout


def generator_of(model: Any, slots: int, tokens: int, n_prompts: int) -> TorchGenerator:
    """Return a generator on transformers' modules with `n_prompts` prompts submitted, 2 completions each."""
    rule = LengthRule(tokens - 1, 1, Marker((END_TOKEN,)))
    sampling = Sampling(1.0, True, 0, 16, rule, END_TOKEN, "transformers")
    generator = TorchGenerator(model, chain_tokenizer(), sampling, slots)
    for n in range(n_prompts):
        generator.submit(prompt_of(n), 0, 2)
    return generator


def prompt_of(n: int) -> Prompt:
    """Return a prompt of the chain task, different for each `n` below 100."""
    return Prompt(f"p/{n}", f"{n % 10} + {n // 10 % 10} * 3 =", "")


def logps(lab: Lab) -> dict[str, Any]:
    """Compare recorded log-probabilities with one forward pass over the completion, in float32 and bf16."""
    figures: dict[str, Any] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = lab.model(dtype)
        generator = generator_of(model, 8, lab.size(128, 12), 8)
        rollouts = [rollout for group in generator.collect(8) for rollout in group]
        gaps_T = np.concatenate([_gap(model, rollout) for rollout in rollouts])
        figures |= {f"{name}_max": float(gaps_T.max()), f"{name}_mean": float(gaps_T.mean())}
    return within(figures, float32_max=2e-3, bfloat16_mean=5e-2)


@torch.no_grad()
def _gap(model: Any, rollout: Rollout) -> np.ndarray:
    device, start = next(model.parameters()).device, len(rollout.prompt_T)
    token_1T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T])[None]).to(device)
    hidden_1TD = hidden_states(model, input_ids=token_1T[:, :-1], use_cache=False)
    logp_TV = log_probs_TV(model, hidden_1TD[0, start - 1 :], 1.0, True)
    found_T = logp_TV.gather(-1, token_1T[0, start:, None])[:, 0].cpu().numpy()
    return np.abs(found_T - rollout.logp_T)[rollout.sampled_T]


def replay_updates(lab: Lab) -> dict[str, Any]:
    """Check completions across nine weight versions against a replay by version with one stale cache."""
    model = lab.model(torch.float32, small=True)
    generator, versions = generator_of(model, 4, 40, 6), weights_of_versions(model, 8)
    for version, weights in enumerate(versions):
        generator.update(WeightStream.of(weights), version)
        for _ in range(4):
            generator.tick()
    return within(replayed(model, versions, generator.collect(6)), error=1e-3)


def weights_of_versions(model: Any, updates: int) -> list[dict[str, torch.Tensor]]:
    """Return a copy of the weights of `model` and `updates` copies with independent noise."""
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(1)
    noisy = [{n: w + 0.05 * w.std() * torch.randn_like(w) for n, w in base.items()} for _ in range(updates)]
    return [base, *noisy]


def replayed(
    model: Any,
    versions: list[dict[str, torch.Tensor]],
    groups: Iterable[Iterable[Rollout]],
    most: int | None = None,
) -> dict[str, Any]:
    """Replay up to `most` completions that span updates, each also with weights one version late."""
    rollouts = [rollout for group in groups for rollout in group]
    spanning = [rollout for rollout in rollouts if len(set(rollout.version_T.tolist())) > 1][:most]
    assert spanning, "no completion saw an update"
    figures = {
        "completions": len(spanning),
        "error": max(_replay_error(model, versions, rollout, 0) for rollout in spanning),
        "error_one_version_late": min(_replay_error(model, versions, rollout, 1) for rollout in spanning),
    }
    assert figures["error_one_version_late"] > 20 * figures["error"], figures
    return figures


@torch.no_grad()
def _replay_error(model: Any, versions: list[dict[str, torch.Tensor]], rollout: Rollout, late: int) -> float:
    """Return the largest per-token difference; `late` delays each version by as many, to plant an error."""
    from transformers import DynamicCache

    device, cache = next(model.parameters()).device, DynamicCache()
    parameters = dict(model.named_parameters())

    def logits(tokens: list[int], version: int) -> torch.Tensor:
        for name, value in versions[max(version - late, 0)].items():
            parameters[name].copy_(value)
        inputs = torch.tensor([tokens], device=device)
        return model(input_ids=inputs, use_cache=True, **{cache_argument(): cache}).logits[0, -1].float()

    *before, previous = rollout.prompt_T.tolist()
    if before:
        logits(before, rollout.first_version + late)
    found = []
    for token, version in zip(rollout.token_T.tolist(), rollout.version_T.tolist(), strict=True):
        found.append(torch.log_softmax(logits([previous], version), -1)[token].item())
        previous = token
    return float(np.abs(np.array(found) - rollout.logp_T)[rollout.sampled_T].max())


def decode(lab: Lab) -> dict[str, Any]:
    """Measure tokens/s with full slots, and their share of the limit set by memory reads.

    At that limit a step takes as long as reading the weights and the KV cache once.
    """
    model, rate = lab.model(tied=True), lab.bytes_per_second()
    figures: dict[str, Any] = {"copy_gb_per_second": rate / 1e9}
    for slots, tokens in ((16, 512), (64, 512), (16, 4096), (64, 4096)):
        slots, tokens = lab.size(slots, slots // 8), lab.size(tokens, tokens // 64)
        lab.forget_peak()
        made, floor = _decoded(lab, model, slots, tokens, rate)
        figures[f"{slots}x{tokens}"] = {"tokens_per_second": made, "of_floor": made / floor} | (
            {"peak_gib": lab.peak_gib()}
        )
    return figures


def _decoded(lab: Lab, model: Any, slots: int, tokens: int, rate: float) -> tuple[float, float]:
    """Return tokens/s over up to 256 decode steps: measured, and at the limit of memory reads."""
    generator = generator_of(model, slots, tokens, slots)
    ticks = min(tokens // 2, 256)
    for _ in range(4):
        generator.work()
    before, first, attended = generator.counters.tokens, generator.counters.ticks, 0

    def work() -> None:
        nonlocal attended
        for _ in range(ticks):
            generator.work()
            attended += slots * (generator.counters.ticks - first + 10)  # 6 tokens of a prompt, and 4

    took = lab.seconds(work)
    config = model.config
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = (ticks * weights + attended * per_position) / rate
    made = generator.counters.tokens - before
    return made / took, made / floor
