"""The memory of every process of a run, term by term, from a recipe and the shape of its model alone.

    trainer_memory, generator_memory   what a process holds throughout, and its working memory
    memory_of                          the same for all processes of a run on one machine, by device
    check_memory                       reports what does not fit, with the keys to change

Sizes are those of tensors: `benchmarks/memory.py` checks them against traces of the package's own functions.
A process on a GPU takes `CONTEXT` bytes more, and the allocator loses a share `GAPS` of all; both are
assumed. Working memory is that of the phase that needs most, so that its terms coexist.

Names: s bytes of a number in the model's precision, T tokens of a forward pass of the trainer.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scalerl.errors import InputError, counted
from scalerl.model_config import ModelShape
from scalerl.rl.config.devices import Gpu, assign
from scalerl.rl.config.engine import BUCKET_MIB, Vllm
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import ALL_LINEAR, Inline

CONTEXT = 600 * 2**20
"""Bytes of CUDA and its libraries in a process that uses a GPU (assumed)."""
GAPS = 0.04
"""Memory that the allocator loses between tensors, as a share of their size (assumed)."""
_LETTERS_OF_A_TOKEN = 4
_FLOAT = 4
_COPIES = 3
"""Arrays of the size of the logits that are alive at once."""

Terms = Mapping[str, int]


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that a role takes on its device: `held` throughout, `working` at the peak of its work."""

    role: str
    held: Terms
    working: Terms
    keys: str
    """The keys of the recipe that change them."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.held.values()) + sum(self.working.values())


def number_bytes(precision: str) -> int:
    """Return the bytes per number in a recipe's precision."""
    return {"float32": 4, "bfloat16": 2}[precision]


def positions_of(recipe: Recipe) -> int:
    """Return the most tokens of a prompt and its completion; a phrase's are estimated from its letters."""
    control = recipe.length.interruption()
    phrase = -(-len(control.phrase) // _LETTERS_OF_A_TOKEN) if control is not None else 0
    return recipe.context.prompt + recipe.context.sampled + phrase


def pass_tokens(recipe: Recipe) -> int:
    """Return the tokens of the trainer's largest forward pass, padding included."""
    longest = positions_of(recipe)
    return max(recipe.batch.micro_tokens or recipe.batch.micro * longest, longest)


# -- the generator -----------------------------------------------------------------------------------------


def generator_memory(recipe: Recipe, shape: ModelShape, slots: int, role: str = "generator") -> RoleMemory:
    """Return the memory of the built-in engine with `slots` decode slots."""
    s = number_bytes(recipe.precision)
    cache = slots * positions_of(recipe) * shape.cache_per_position(s)
    # Completions of a group share the pass over their prompt, which makes four arrays of the inner size.
    prompts = -(-slots // recipe.batch.samples) * recipe.context.prompt
    # Cache blocks are gathered into rows, one layer at a time, and repeated for each query head.
    reach = slots * positions_of(recipe)
    rows = reach * shape.cache_per_position(s) // shape.layers
    gathered = {"keys and values of a layer": rows + reach * 2 * shape.heads * shape.head_dim * s}
    # Log-probabilities, and their cumulative sum in float64, from probabilities in float64.
    decode = {"logits": 5 * slots * shape.vocabulary * _FLOAT}
    # Keys and values of prompts are repeated for each query head.
    repeated = 2 * shape.heads * shape.head_dim * s
    attention = {
        "a layer of prompts": prompts * (4 * shape.inner * s + 4 * shape.hidden * _FLOAT + repeated),
    }
    # The layers are finished before the LM head starts, so the peak is the largest of the three.
    working = max(decode, attention, gathered, key=lambda terms: sum(terms.values()))
    held = {"weights": shape.parameters * s, "KV cache": cache}
    key = "evaluation.decode_slots" if role == "evaluation" else "decode_slots"
    return RoleMemory(role, held, working, f"{key} or context")


# -- the trainer -------------------------------------------------------------------------------------------


def block_activations(shape: ModelShape, s: int) -> int:
    """Return the bytes per token that a block keeps for its backward pass.

    A norm keeps its input in float32, and its result before and after the weight; attention keeps queries,
    keys, values, its result, and one number per head; the feed-forward part four arrays of the inner size.
    """
    norm, qk = _FLOAT + 2 * s, shape.head_dim * (shape.heads + shape.kv_heads)
    attention = qk * (norm if shape.normed else s) + shape.head_dim * (shape.kv_heads + shape.heads) * s
    return 2 * shape.hidden * norm + attention + shape.heads * _FLOAT + 4 * shape.inner * s


def trainer_memory(recipe: Recipe, shape: ModelShape, ranks: int = 1) -> RoleMemory:
    """Return the memory of one of `ranks` trainer processes."""
    s, trained = number_bytes(recipe.precision), shape.parameters
    if recipe.lora.rank:
        trained = shape.layers * recipe.lora.rank * _adapted_widths(recipe, shape)
    sharded = ranks > 1
    frozen = shape.parameters - trained if recipe.lora.rank else 0
    held = {
        "weights": 0 if sharded else shape.parameters * s,
        "masters": trained * _FLOAT // ranks if sharded or s != _FLOAT else 0,
        "frozen weights": frozen * _FLOAT // ranks if sharded else 0,
        "gradients": trained * _FLOAT // ranks,
        "moments": 0 if recipe.learner.offload_optimiser else 2 * trained * _FLOAT // ranks,
        "base model": (shape.parameters * (_FLOAT if sharded else s) // ranks)
        if recipe.kl.coefficient
        else 0,
    }
    if getattr(recipe.loss, "updates", 1) > 1:
        held["proximal weights"] = trained * (_FLOAT if sharded else s) // ranks
    working = max(_phases(recipe, shape, trained, ranks), key=lambda terms: sum(terms.values()))
    settings = recipe.learner
    keys = ["learner.activation_checkpointing"] * (not settings.activation_checkpointing)
    if sum(held.values()) > sum(working.values()):
        keys = ["learner.offload_optimiser"] * (not settings.offload_optimiser) + ["lora.rank", *keys]
    keys.append("batch.micro_tokens or context" + ", or more trainers" * sharded)
    return RoleMemory("trainer", held, working, ", ".join(keys))


def _adapted_widths(recipe: Recipe, shape: ModelShape) -> int:
    """Return the inputs plus outputs of a block's adapted matrices, as an adapter is two thin matrices."""
    queries, keys = shape.head_dim * shape.heads, shape.head_dim * shape.kv_heads
    outputs = {
        **{"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries},
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.inner),
    }
    targets = {target.rpartition(".")[2] for target in recipe.lora.targets}
    return sum(shape.hidden + n for name, n in outputs.items() if targets & {name, ALL_LINEAR})


def _phases(recipe: Recipe, shape: ModelShape, trained: int, ranks: int) -> Sequence[Terms]:
    """Return the working memory of each phase of a pass: logits, backward pass of a block, and its end."""
    s, tokens, settings = number_bytes(recipe.precision), pass_tokens(recipe), recipe.learner
    sharded = ranks > 1
    residual, of_block = tokens * shape.hidden * s, block_activations(shape, s) * tokens
    kept = shape.layers * (residual if settings.activation_checkpointing else of_block)
    kept += 2 * residual + tokens * shape.hidden * _FLOAT  # the embedding, and tensors of the last norm
    # Embedding and head, and two blocks, as one is fetched while another computes.
    gathered = {"gathered weights": (shape.outside + 2 * shape.block) * s if sharded else 0}
    chunks = -(-tokens // settings.chunk)
    places = min(tokens, settings.chunk) * shape.vocabulary * _FLOAT
    one = 0 if recipe.lora.rank else shape.embedding * _FLOAT
    at_head = _head_moment(recipe, places, one * (chunks > 1), one)
    # Gradients reduced at the end of a step stay unsharded on every rank until then.
    unreduced = trained * _FLOAT * (sharded and settings.reduce == "step")
    gathered |= {"unreduced gradients": unreduced}
    logits = {**gathered, "activations": kept + 2 * residual, **at_head}
    # Gradients of a pass before the masters add them: all, or with shards a block and what is outside blocks.
    whole = trained * s if s != _FLOAT else 0
    if sharded:
        whole = (shape.block + shape.outside) * (s + _FLOAT)
    inside = 4 * tokens * shape.inner * s + residual
    inside += of_block * settings.activation_checkpointing  # which recomputes them
    first = {"activations": kept + inside, "gradients of a pass": min(shape.embedding * s, whole)}
    last = {"activations": inside + residual, "gradients of a pass": whole}
    # Weights are freed before their gradients are reduced; those outside the blocks come last.
    return logits, gathered | first, {"unreduced gradients": unreduced} | last


def _head_moment(recipe: Recipe, places: int, sum_so_far: int, one: int) -> Terms:
    """Return the peak memory of the LM head's backward pass over one chunk.

    `places` is the size of the logits, `one` that of the head's gradient from one chunk, in float32, and
    `sum_so_far` that of its sum over the chunks before.
    """
    moments = [(_COPIES * places, sum_so_far)]  # during the softmax
    if number_bytes(recipe.precision) == _FLOAT:
        moments.append((2 * places, sum_so_far + one))
    elif recipe.fp32_head("trainer"):
        # The product is computed from two bfloat16 halves, one after the other.
        moments += [((_COPIES + 1) * places, sum_so_far + one), (_COPIES * places, sum_so_far + 2 * one)]
    else:
        moments.append((places + places // 2, sum_so_far + one))
    logits, gradient = max(moments, key=sum)
    return {"logits": logits, "gradient of the head": gradient}


# -- all processes of a run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the processes on one device; roles of one process take turns, so only one of them works."""

    name: str
    capacity: int
    """Free bytes."""
    processes: tuple[tuple[RoleMemory, ...], ...]
    on_gpu: bool = True

    @property
    def total(self) -> int:
        """Bytes of all processes at the peak.

        On a CPU, only held bytes: the working memory of its kernels is small, and not known here.
        """
        held = sum(sum(role.held.values()) for roles in self.processes for role in roles)
        if not self.on_gpu:
            return held
        working = sum(max(sum(role.working.values()) for role in roles) for roles in self.processes)
        return round((held + working) * (1 + GAPS)) + CONTEXT * len(self.processes)

    @property
    def excess(self) -> int:
        """Missing bytes; 0 if the processes fit."""
        return max(self.total - self.capacity, 0)

    @property
    def fits(self) -> bool:
        """Whether the processes fit."""
        return self.excess == 0


def memory_of(
    recipe: Recipe,
    shape: ModelShape,
    gpus: Sequence[Gpu],
    n_heldout: int | None = None,
    trainers: int | None = None,
) -> list[DeviceMemory]:
    """Return the memory on every device of one machine; without GPUs, on the machine itself.

    The devices of a cluster are not known here: the result has one device per role, as large as the first of
    `gpus`. An evaluation has `n_heldout` prompts; if None, enough to fill its decode slots. `trainers` is the
    number that torchrun has started, instead of the recipe's.
    """
    ranks = trainers or recipe.trainers
    trainer = trainer_memory(recipe, shape, ranks)
    generator = generator_memory(recipe, shape, recipe.decode_slots)
    slots = recipe.evaluation.decode_slots if n_heldout is None else recipe.evaluation.slots_for(n_heldout)
    evaluation = generator_memory(recipe, shape, slots, "evaluation")
    if recipe.cluster is not None:
        return _on_cluster(recipe, shape, gpus, (trainer, generator, evaluation))
    if recipe.vllm is not None:
        return _with_vllm(recipe, recipe.vllm, shape, gpus, trainer, ranks)
    turns = isinstance(recipe.placement, Inline)
    first = (trainer, generator) if turns else (trainer,)
    if not gpus:
        others = [(trainer,)] * (ranks - 1) + [(generator,)] * (0 if turns else recipe.processes)
        return [_machine([first, *others, (evaluation,)])]
    found, assignment = [], assign(recipe, gpus, ranks)
    for gpu in gpus:
        on_it = [first] if gpu.name in assignment.trainers[:1] else []
        on_it += [(trainer,)] * assignment.trainers[1:].count(gpu.name)
        on_it += [(generator,)] * assignment.generators.count(gpu.name)
        # An evaluation on the device of an inline engine uses that engine and its cache.
        shares = turns and gpu.name in assignment.trainers
        on_it += [(evaluation,)] if gpu.name == assignment.evaluator and not shares else []
        found.append(DeviceMemory(gpu.name, gpu.free, tuple(on_it)))
    return found


def _machine(processes: Sequence[tuple[RoleMemory, ...]]) -> DeviceMemory:
    """Return the memory of a machine without GPUs."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceMemory("machine", memory, tuple(processes), on_gpu=False)


def _with_vllm(
    recipe: Recipe, engine: Vllm, shape: ModelShape, gpus: Sequence[Gpu], trainer: RoleMemory, ranks: int
) -> list[DeviceMemory]:
    """Return the memory of trainers and vLLM workers on the devices of one machine."""
    server = _server_memory(recipe, shape, engine, on_gpu=bool(gpus))
    if not gpus:
        return [_machine([(trainer,)] * ranks + [(server,)] * (0 if engine.urls else recipe.processes))]
    found, assignment = [], assign(recipe, gpus, ranks)
    for gpu in gpus:
        share = DeviceMemory(f"{gpu.name}, vLLM's share", round(gpu.memory * engine.gpu_memory), ((server,),))
        if assignment.shared and gpu.name in assignment.trainers:
            found += [_beside_server(gpu, _with_bucket(trainer, recipe, shape, engine), share), share]
        elif gpu.name in assignment.used.difference(assignment.trainers):
            found.append(replace(share, capacity=min(share.capacity, gpu.free)))
        else:
            found.append(DeviceMemory(gpu.name, gpu.free, ((trainer,),) * (gpu.name in assignment.trainers)))
    return found


def _on_cluster(
    recipe: Recipe, shape: ModelShape, gpus: Sequence[Gpu], roles: tuple[RoleMemory, RoleMemory, RoleMemory]
) -> list[DeviceMemory]:
    if not gpus:
        return []  # only the cluster knows its machines
    trainer, generator, evaluation = roles
    cluster, memory = recipe.on_cluster, gpus[0].free
    part = min(cluster.generator.gpus_or(1.0) or 1.0, 1.0)
    of_trainer = min(cluster.trainer.gpus_or(1.0) or 1.0, 1.0) if cluster.learner.kind != "one" else 1.0
    devices = [DeviceMemory(_of_each(cluster.trainers, "trainer"), round(memory * of_trainer), ((trainer,),))]
    # The number of GPUs is known only for a cluster of this machine alone.
    there = len(gpus) - cluster.beside_ray if cluster.address == "local" else math.inf
    beside = cluster.evaluates_beside(there)
    alone = cluster.generators - beside
    last = (
        DeviceMemory("of the last generator", memory, ((generator,), (evaluation,)))
        if beside
        else DeviceMemory("of the evaluation", round(memory * part), ((evaluation,),))
    )
    generating = DeviceMemory(_of_each(alone, "generator"), round(memory * part), ((generator,),))
    if engine := recipe.vllm:
        server = _server_memory(recipe, shape, engine)
        # A local cluster may give them any GPU but the driver's, even one smaller than the first.
        local = cluster.address == "local"
        own = gpus[cluster.beside_ray :] if local and not engine.urls else ()
        where = "" if local or engine.urls else ", on any node"
        share = DeviceMemory(
            f"of {counted(recipe.processes, 'vLLM server')}, {engine.tensor_parallel} each{where}",
            round(min(gpu.memory for gpu in own or gpus[:1]) * engine.gpu_memory),
            ((server,),),
        )
        if cluster.shares_gpu(engine, len(gpus)):
            trainer = _with_bucket(trainer, recipe, shape, engine)
            return [_beside_server(gpus[0], trainer, share), share]
        return [*devices, share]
    return [*devices, *[generating] * (alone > 0), last]


def _with_bucket(trainer: RoleMemory, recipe: Recipe, shape: ModelShape, engine: Vllm) -> RoleMemory:
    """Return the trainer's memory on a GPU from which vLLM reads the weights, one bucket at a time."""
    if engine.transport not in ("ipc", "auto"):
        return trainer
    largest = max(shape.embedding, shape.hidden * shape.inner) * number_bytes(recipe.precision)
    bucket = max(largest, round(BUCKET_MIB * 2**20))
    return replace(trainer, held={**trainer.held, "bucket of weights": bucket})


def _server_memory(recipe: Recipe, shape: ModelShape, engine: Vllm, on_gpu: bool = True) -> RoleMemory:
    """Return the least memory that a vLLM server needs on each of its GPUs, or on a CPU."""
    held = {"weights": shape.parameters * number_bytes(recipe.precision) // engine.tensor_parallel}
    if not on_gpu:
        return RoleMemory(
            "vLLM server", held | {"KV cache": engine.cpu_cache_gib * 2**30}, {}, "engine.cpu_cache_gib"
        )
    cache = positions_of(recipe) * shape.cache_per_position(number_bytes(recipe.precision))
    held["KV cache of a completion"] = cache // engine.tensor_parallel
    keys = "engine.tensor_parallel, engine.gpu_memory or context"
    return RoleMemory("vLLM server", held, {}, keys)


def _beside_server(gpu: Gpu, trainer: RoleMemory, share: DeviceMemory) -> DeviceMemory:
    """Return the trainer's part of a GPU of which a vLLM server takes a share."""
    free = gpu.free - CONTEXT  # vLLM does not count its own context in its share
    needed = DeviceMemory("", 0, ((trainer,),)).total
    most = math.floor(100 * (free - needed) / gpu.memory) / 100
    if most * gpu.memory >= share.total:  # otherwise no share is enough for both
        trainer = replace(trainer, keys=f"engine.gpu_memory ({most:g} or less fits), {trainer.keys}")
    return DeviceMemory("of the trainer, beside vLLM", free - share.capacity, ((trainer,),))


def _of_each(n: int, role: str) -> str:
    return f"of the {role}" if n == 1 else f"of each of {n} {role}s"


def check_memory(devices: Sequence[DeviceMemory]) -> None:
    """Raise an InputError for the device that lacks most, with its largest term and the keys to change."""
    over = [device for device in devices if not device.fits]
    if over:
        worst = max(over, key=lambda device: device.excess)
        more = f"; so {'are' if len(over) > 2 else 'is'} {len(over) - 1} more" if len(over) > 1 else ""
        if not all(device.processes for device in devices):
            more += f"; --gpus {len(devices)} splits the roles over all GPUs of this machine"
        raise InputError(f"memory: {overfull(worst)}{more}; --dry-run shows all terms")


def overfull(device: DeviceMemory) -> str:
    """Return why the processes do not fit on a device, and which keys to change."""
    roles = [role for of_process in device.processes for role in of_process]
    largest = max(roles, key=lambda role: role.total)
    sizes = ", ".join(f"{role.role} {gib(role.total)}" for role in roles)
    name, size = max((*largest.held.items(), *largest.working.items()), key=lambda term: term[1])
    where = f"GPU {device.name}" if device.on_gpu else "this machine"
    return (
        f"{where} has {gib(device.capacity)} GiB free, and {gib(device.total)} are needed ({sizes}); "
        f"the most is {name} of the {largest.role}, {gib(size)}: change {largest.keys}"
    )


def gib(n_bytes: int) -> str:
    """Format bytes in GiB."""
    return f"{n_bytes / 2**30:,.1f}"
