"""vLLM beside the learner on one device: completions across weight updates in flight, and its speed.

vLLM has its own Python: `SCALERL_VLLM_PYTHON`, or the one that `make vllm` sets up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch

from gpu_checks import SkippedError
from gpu_checks.engine import prompt_of, replayed, weights_of_versions
from gpu_checks.lab import Lab, within
from random_model import END_TOKEN, chain_tokenizer
from scalerl.errors import InputError
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.engine.vllm.launch import find_python, place_workers
from scalerl.rl.model.weights import WeightStream, bytes_of, weights_of

_UPDATES = 8


def updates_in_flight(lab: Lab) -> dict[str, Any]:
    """Replay, by version and with one cache, completions across versions that vLLM got in device memory."""
    model, version = lab.model(torch.float32, small=True), 0
    versions = weights_of_versions(model, _UPDATES)
    with _generating(lab, model, "float32", slots=4, tokens=300, more=("--enforce-eager",)) as generator:
        for n in range(24):
            generator.submit(prompt_of(n), 0, 2)
        while generator.ready < 24:
            if generator.installed == version < _UPDATES:
                version += 1
                generator.update(WeightStream.of(versions[version]), version)
            time.sleep(0.01)
        groups = generator.take(24)
        install_ms = [1e3 * seconds for seconds in generator.update_seconds[1:]]
    figures = {"updates": version, "install_ms": sorted(install_ms)[len(install_ms) // 2]}
    # vLLM's attention multiplies in TF32 on a GPU.
    return within(figures | replayed(model, versions, groups, most=8), error=2e-2)


def decode(lab: Lab) -> dict[str, Any]:
    """Measure vLLM's tokens/s with 16 and 64 slots of 512 tokens, and the seconds of an update meanwhile."""
    dtype = torch.float32 if lab.tiny else torch.bfloat16
    model, name = lab.model(dtype, tied=True), str(dtype).removeprefix("torch.")
    slots, tokens = lab.size(64, 8), lab.size(512, 32)
    weights, figures = weights_of(model), {}
    with _generating(lab, model, name, slots, tokens) as generator:
        for at_once in (slots // 4, slots):
            before, started = generator.counters.tokens, time.perf_counter()
            for n in range(at_once // 2):
                generator.submit(prompt_of(n), 0, 2)
            if at_once == slots:
                generator.update(weights, 1)
            generator.collect(at_once // 2)
            made = generator.counters.tokens - before
            figures[f"{at_once}x{tokens}"] = made / (time.perf_counter() - started)
        figures["update_seconds"] = generator.update_seconds[-1]
    return figures | {"bytes": sum(map(bytes_of, weights.plan))}


@contextmanager
def _generating(
    lab: Lab, model: Any, precision: str, slots: int, tokens: int, more: tuple[str, ...] = ()
) -> Iterator[VllmGenerator]:
    """Yield a started generator with one worker, on the same device as `model`."""
    settings = Vllm(
        gpu_memory=0.3,
        arguments=("--block-size", "32", *more),
    )
    try:
        find_python(settings)
    except InputError as error:
        raise SkippedError(str(error)) from error
    folder, tokenizer = str(lab.folder / "model"), chain_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sampling = Sampling(1.0, True, 0, 16, LengthRule(tokens - 1, 1, Marker((END_TOKEN,))), END_TOKEN)
    place = partial(place_workers, settings, 1, 1, folder, lab.folder)
    generator = VllmGenerator(
        settings,
        sampling,
        tokenizer,
        folder,
        weights_of(model),
        slots=slots,
        precision=precision,
        place=place,
    )
    with closing(generator):
        generator.wait_until_started()
        yield generator
