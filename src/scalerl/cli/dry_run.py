"""`scalerl train --dry-run`: the recipe in full, the devices of every role, and the memory of each."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from scalerl.cli.shared.arguments import print_json
from scalerl.jsonl import flat
from scalerl.model_config import ModelShape
from scalerl.rl.config.cluster import Cluster, Fsdp2, OneProcess
from scalerl.rl.config.devices import Gpu, assign, use_first, visible_gpus
from scalerl.rl.config.engine import BUILT_IN
from scalerl.rl.config.memory import (
    DeviceMemory,
    check_memory,
    gib,
    memory_of,
    number_bytes,
    overfull,
    positions_of,
)
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Inline, Local
from scalerl.rl.model.shape import is_made_here, shape_of
from scalerl.view.terminal.rows import print_table

_RATES = "h100-8b"
"""Rates by which devices are split: only the ratio of generation to training matters, at any model size."""


def use_gpus(recipe: Recipe, n: int, split: bool) -> tuple[Recipe, tuple[Gpu, ...]]:
    """Return the recipe for `n` GPUs, and the GPUs; `split` divides them between roles if the recipe has not.

    They are the first GPUs of this machine; for a cluster elsewhere, only the number is divided.

    Raises:
        InputError: this machine has fewer GPUs, or there are too few for the roles.
    """
    cluster = recipe.cluster
    gpus = use_first(n) if cluster is None or cluster.address == "local" else visible_gpus()
    vllm = recipe.vllm
    # A recipe for the built-in engine may leave one GPU over, for evaluations.
    whole = (n,) if vllm else (n, n - 1)
    divided = isinstance(recipe.placement, Local) and recipe.devices in whole
    if n == 1 or not split or divided or (vllm and vllm.urls):
        return recipe, gpus
    from scalerl.plan.job import PlannedJob
    from scalerl.plan.rates import load_rates
    from scalerl.plan.split import quick_split

    shape, each = shape_of(recipe), vllm.tensor_parallel if vllm else 1

    def on(generators: int, trainers: int) -> Recipe:
        if cluster is None:
            return replace(recipe, placement=Local(generators, trainers))
        return replace(recipe, cluster=cluster.split(generators, trainers))

    def excess(*numbers: int) -> int:
        return max((device.excess for device in memory_of(on(*numbers), shape, gpus)), default=0)

    return on(*quick_split(PlannedJob.of(recipe), load_rates(_RATES), n, excess, each)), gpus


def notices(recipe: Recipe, gpus: Sequence[Gpu]) -> list[str]:
    """Return warnings about the built-in engine on GPUs, and about unused GPUs of this machine; none on a
    cluster."""
    gpus = gpus if recipe.cluster is None else ()
    found = []
    if gpus and recipe.engine == BUILT_IN and not is_made_here(recipe.model):
        there = os.environ.get("SCALERL_VLLM_PYTHON") or find_spec("vllm")
        how = "--set engine.kind=vllm" + ("" if recipe.apart else " --generators 1")
        found = [
            "the built-in engine generates (engine.kind = auto), many times slower on a GPU than vLLM: "
            + (how if there else f"{how}, once it is installed (docs/howto/vllm.md)")
        ]
    given = assign(recipe, gpus, min(recipe.trainers, len(gpus)))
    if idle := [gpu.name for gpu in gpus if gpu.name not in given.used]:
        which = f"GPU{'s' * (len(idle) > 1)} {', '.join(idle)} {'is' if len(idle) == 1 else 'are'} not used"
        found.append(f"{which}: --gpus {len(gpus)} alone splits all of them between the roles")
    return found


def planned_memory(
    recipe: Recipe, shape: ModelShape, gpu: Gpu, generators: int, trainers: int
) -> list[DeviceMemory]:
    """Return the memory of one device per role, with `generators` + `trainers` devices like `gpu`."""
    cluster = recipe.cluster or Cluster()
    learner = Fsdp2() if trainers > 1 else OneProcess()
    cluster = replace(cluster, generators=generators, trainers=trainers, learner=learner)
    recipe = replace(recipe, placement=Inline(), cluster=cluster)
    return memory_of(recipe, shape, [gpu] * (generators + trainers))


def dry_run(recipe: Recipe, gpus: Sequence[Gpu], as_json: bool) -> None:
    """Print the plan of a run.

    Raises:
        InputError: it does not fit; everything is printed first.
    """
    shape = shape_of(recipe)
    devices = memory_of(recipe, shape, gpus)
    if as_json:
        found = {"recipe": recipe.to_json(), "parameters": shape.parameters}
        print_json(found | {"devices": [device_json(device) for device in devices]})
    else:
        for key, value in flat(recipe.to_json()).items():  # in the form of --set
            print(f"{key} = {value}")
        print()
        rows = [row for device in devices for row in _rows(device)]
        print_table(rows, ("device", "role", "memory", "GiB"))
        if not devices:
            print(
                "the devices of a cluster are not known here: SCALERL_GPUS=1x80 checks against one of 80 GiB"
            )
        for line in _kv_room(recipe, shape, devices):
            print(line)
        if not recipe.lora.rank:  # weights in the recipe's precision; masters and two moments in float32
            size, keep = gib(shape.parameters * (number_bytes(recipe.precision) + 12)), recipe.checkpoint.keep
            print(f"a checkpoint: about {size} GiB on disk; checkpoint.keep = {keep} of them stay")
    check_memory(devices)


def _kv_room(recipe: Recipe, shape: ModelShape, devices: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yield a line on the length of completions while all decode slots of a vLLM worker are in use."""
    of_roles = ((device, role) for device in devices for roles in device.processes for role in roles)
    found = next(((device, role) for device, role in of_roles if role.role == "vLLM server"), None)
    if found is None or recipe.vllm is None or not found[0].on_gpu:
        return
    device, server = found
    position = shape.cache_per_position(number_bytes(recipe.precision)) / recipe.vllm.tensor_parallel
    room, slots = max(device.capacity - server.held["weights"], 0) / position, recipe.decode_slots
    yield (
        f"KV cache of a vLLM server: {room:,.0f} tokens at most, {room / slots:,.0f} for each of {slots} "
        f"decode slots, of {positions_of(recipe):,} of the longest; what has none waits"
    )


def _rows(device: DeviceMemory) -> Iterator[tuple[str, str, str, str]]:
    name = f"GPU {device.name}" if device.on_gpu else device.name
    for roles in device.processes:
        for role in roles:
            for term, n_bytes in (*role.held.items(), *(role.working.items() if device.on_gpu else ())):
                if n_bytes >= 2**20:
                    yield name, role.role, term, gib(n_bytes)
                    name = ""
    verdict = "not used" if not device.processes else "fits" if device.fits else "DOES NOT FIT"
    yield name, "all", f"of {gib(device.capacity)} free: {verdict}", gib(device.total)


def device_json(device: DeviceMemory) -> dict[str, Any]:
    """Return the memory of a device, as `--json` prints it."""
    return {
        "name": device.name,
        "free_bytes": device.capacity,
        "bytes": device.total,
        "fits": device.fits,
        "why": None if device.fits else overfull(device),
        "processes": [
            [
                {"role": r.role, "held": dict(r.held), "working": dict(r.working), "keys": r.keys}
                for r in roles
            ]
            for roles in device.processes
        ],
    }
