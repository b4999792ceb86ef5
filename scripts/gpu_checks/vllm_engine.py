"""vLLM beside the learner, on the same device: completions over versions loaded in flight, and its speed.

vLLM has a Python of its own: `SCALERL_VLLM_PYTHON`, or what `make vllm` sets up.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_checks import SkippedError
from gpu_checks.engine import replay_error, weights_of_versions
from gpu_checks.lab import Lab, within
from random_model import END_TOKEN, chain_tokenizer
from scalerl.errors import InputError
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.engine.vllm.launch import find_python
from scalerl.rl.model.weights import WeightStream, bytes_of, weights_of
from scalerl.rl.types import Prompt, Rollout

_UPDATES = 8


def updates_in_flight(lab: Lab) -> dict[str, Any]:
    """Completions over versions handed to vLLM in the device's memory, replayed by version with one cache."""
    model = lab.model(torch.float32, small=True)
    versions = weights_of_versions(model, _UPDATES)
    generator = _generator(lab, model, "float32", slots=4, tokens=300, more=("--enforce-eager",))
    try:
        for n in range(24):
            generator.submit(_prompt(n), 0, 2)
        version = 0
        while generator.ready < 24:
            if generator.installed == version < _UPDATES:
                version += 1
                generator.update(WeightStream.of(versions[version]), version)
            time.sleep(0.01)
        rollouts = _rollouts(generator, 24)
        install_ms = [1e3 * seconds for seconds in generator.install_seconds[1:]]
    finally:
        generator.close()
    spanning = [rollout for rollout in rollouts if len(set(rollout.version_T.tolist())) > 1][:8]
    assert spanning, f"no completion saw an update; {version} were installed"
    figures = {
        "updates": version,
        "completions": len(spanning),
        "install_ms": sorted(install_ms)[len(install_ms) // 2],
        "error": max(replay_error(model, versions, rollout, 0) for rollout in spanning),
        "error_one_version_late": min(replay_error(model, versions, rollout, 1) for rollout in spanning),
    }
    assert figures["error_one_version_late"] > 20 * figures["error"], figures
    return within(figures, error=2e-2)  # its attention multiplies in TF32 on a GPU


def decode(lab: Lab) -> dict[str, Any]:
    """Tokens/s of vLLM with 16 and 64 slots, 512 tokens, and the seconds of an update meanwhile."""
    dtype = torch.float32 if lab.tiny else torch.bfloat16
    model, name = lab.model(dtype, tied=True), str(dtype).removeprefix("torch.")
    slots, tokens = lab.size(64, 8), lab.size(512, 32)
    generator, figures = _generator(lab, model, name, slots, tokens), {}
    try:
        for at_once in (slots // 4, slots):
            before, started = generator.counters.tokens, time.perf_counter()
            for n in range(at_once // 2):
                generator.submit(_prompt(n), 0, 2)
            if at_once == slots:
                generator.update(weights_of(model), 1)
            _rollouts(generator, at_once // 2)
            made = generator.counters.tokens - before
            figures[f"{at_once}x{tokens}"] = made / (time.perf_counter() - started)
        figures["install_seconds"] = generator.install_seconds[-1]
        figures["bytes"] = sum(bytes_of(spec) for spec in weights_of(model).plan)
    finally:
        generator.close()
    return figures


def _generator(
    lab: Lab, model: Any, precision: str, slots: int, tokens: int, more: tuple[str, ...] = ()
) -> VllmGenerator:
    """Return a started generator with one worker, on the device that `model` is on."""
    settings = Vllm(
        transport="ipc" if lab.device.type == "cuda" else "file",
        gpu_memory=0.3,
        arguments=("--block-size", "32", *more),
    )
    try:
        find_python(settings)
    except InputError as error:
        raise SkippedError(str(error)) from error
    folder, tokenizer = lab.folder / "model", chain_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rule = LengthRule(tokens - 1, 1, Marker((END_TOKEN,)))
    sampling = Sampling(1.0, True, 0, 16, rule, END_TOKEN)
    generator = VllmGenerator(
        settings,
        sampling,
        tokenizer,
        str(folder),
        weights_of(model),
        slots=slots,
        precision=precision,
        logs=lab.folder,
    )
    try:
        generator.wait_until_started()
    except BaseException:
        for log in lab.folder.glob("vllm-*.log"):
            print(log.read_text()[-6000:], flush=True)
        generator.close()
        raise
    return generator


def _prompt(n: int) -> Prompt:
    return Prompt(f"p/{n}", f"{n % 10} + {n // 10 % 10} * 3 =", "")


def _rollouts(generator: VllmGenerator, n: int) -> list[Rollout]:
    while generator.ready < n:
        generator.work()
    return [rollout for group in generator.take(n) for rollout in group]
