"""Memory from a recipe and a shape: worked out by hand, and against what the package allocates."""

import re
from pathlib import Path

import pytest

from scalerl.errors import InputError
from scalerl.model_config import ModelShape
from scalerl.rl.config.devices import Gpu
from scalerl.rl.config.memory import (
    CONTEXT,
    GAPS,
    block_activations,
    check_memory,
    generator_memory,
    memory_of,
    pass_tokens,
    trainer_memory,
)
from scalerl.rl.config.recipe import load_recipe

GIB = 2**30
SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
SETTINGS = (
    *("precision=bfloat16", "batch.micro=1", "decode_slots=6", "batch.samples=2"),
    *("context.prompt=20", "context.thinking=60", "context.answer=16", "length.low=30", "length.high=40"),
)


def recipe(*settings):
    return load_recipe("demo", [*SETTINGS, *settings])


def shape(**changes):
    return ModelShape.of(SMALL | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # Qwen3-0.6B and 8B, as their cards have them: 0.44 B and 6.95 B without embeddings.
        (
            {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "vocab_size": 151936,
            },
            596_049_920,
        ),
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 12288,
                "vocab_size": 151936,
                "tie_word_embeddings": False,
            },
            8_190_735_360,
        ),
    ],
)
def test_parameters_of_published_models(changes, parameters):
    assert shape(**changes).parameters == parameters


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_transformers_own_models(kind, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SMALL | {"model_type": kind, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = shape(model_type=kind, tie_word_embeddings=tied)
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_norms_of_queries_and_keys_are_kept_beside_biases():
    assert block_activations(shape(attention_bias=True), 2) == block_activations(shape(), 2)
    # Each of 6 heads of 16 keeps 4 + 2 bytes more: the input in float32, and the result before the weight.
    assert block_activations(shape(), 2) - block_activations(shape(model_type="llama"), 2) == 6 * 16 * 6


def test_terms_worked_out_by_hand():
    of, n = recipe("lora.rank=0"), shape().parameters
    trainer, generator = trainer_memory(of, shape()), generator_memory(of, shape(), 6)
    assert trainer.held == {
        "weights": 2 * n,
        "masters": 4 * n,
        "frozen weights": 0,
        "gradients": 4 * n,
        "moments": 8 * n,
        "base model": 0,
    }
    # Twice (keys, values) 3 layers, 2 heads of 16, 2 bytes: 384 a position.
    assert generator.held["KV cache"] == 6 * pass_tokens(of) * 384
    sharded = trainer_memory(of, shape(), ranks=4)
    assert sharded.held["moments"] == 2 * n
    assert sharded.held["weights"] == 0
    assert trainer_memory(recipe("learner.offload_optimiser=true"), shape()).held["moments"] == 0
    assert trainer_memory(recipe("kl.coefficient=0.1"), shape()).held["base model"] == 2 * n
    decoupled = recipe("loss.kind=decoupled")
    assert trainer_memory(decoupled, shape()).held["proximal weights"] == 2 * n
    assert trainer_memory(decoupled, shape(), ranks=4).held["proximal weights"] == n


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("learner.activation_checkpointing=true",),
        ("learner.activation_checkpointing=true", "learner.chunk=16"),
        ("fp32_logits=neither",),
        ("precision=float32",),
        ("batch.micro=8",),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 640}, {"vocab_size": 200}])
def test_formulas_agree_with_a_trace(settings, changes, monkeypatch):
    from transformers import AutoConfig

    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from memory import trace_generator, trace_trainer

    config, of = AutoConfig.for_model(**SMALL | changes), recipe(*settings)
    assert trainer_memory(of, shape(**changes)).total == pytest.approx(trace_trainer(of, config), rel=0.1)
    found = generator_memory(of, shape(**changes), 6).total
    assert found == pytest.approx(trace_generator(of, config, 6), rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("learner.activation_checkpointing=true",),
        ("learner.activation_checkpointing=true", "learner.chunk=16"),
        ("learner.reduce=step",),
        ("fp32_logits=neither",),
        ("precision=float32",),
        ("batch.micro=8",),
        ("loss.kind=decoupled",),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 640, "tie_word_embeddings": False}])
def test_the_formula_of_a_rank_agrees_with_a_trace_of_fsdp2(settings, changes, monkeypatch):
    from transformers import AutoConfig

    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from memory import trace_rank

    config, of = AutoConfig.for_model(**SMALL | changes), recipe(*settings)
    found = trainer_memory(of, shape(**changes), ranks=4).total
    assert found == pytest.approx(trace_rank(of, config, 4), rel=0.1)


def of_gpus(*sizes):
    return [Gpu(str(i), round(size), round(size)) for i, size in enumerate(sizes)]


def test_roles_that_take_turns_hold_together_and_work_apart():
    of = recipe()
    trainer, generator = trainer_memory(of, shape()), generator_memory(of, shape(), 6)
    (device,) = memory_of(of, shape(), of_gpus(GIB))
    held = sum(trainer.held.values()) + sum(generator.held.values())
    working = max(sum(trainer.working.values()), sum(generator.working.values()))
    # Evaluations have the generator's engine: nothing of their own.
    assert device.total == round((held + working) * (1 + GAPS)) + CONTEXT
    assert device.fits


def test_processes_on_one_device_are_added_up():
    """Each of them would fit by itself."""
    of = recipe("placement.kind=local", "placement.generators=2", "evaluation.decode_slots=6")
    each = [trainer_memory(of, shape()), *[generator_memory(of, shape(), 6)] * 3]
    total = round(sum(role.total for role in each) * (1 + GAPS)) + 4 * CONTEXT
    (device,) = memory_of(of, shape(), of_gpus(total))
    assert [roles[0].role for roles in device.processes] == [
        "trainer",
        "generator",
        "generator",
        "evaluation",
    ]
    assert device.total == total
    check_memory([device])
    with pytest.raises(InputError, match=r"GPU 0 has .* GiB free.*change .*; --dry-run shows all terms"):
        check_memory(memory_of(of, shape(), of_gpus(total - 1)))


def test_the_key_of_the_largest_term_is_named():
    with pytest.raises(InputError, match=r"KV cache of the generator.*change decode_slots or context"):
        check_memory(memory_of(recipe("decode_slots=1000000"), shape(), of_gpus(24 * GIB)))
    with pytest.raises(
        InputError, match=r"activations of the trainer.*change learner\.activation_checkpointing"
    ):
        check_memory(memory_of(recipe("batch.micro=100000"), shape(vocab_size=100), of_gpus(24 * GIB)))


def test_a_server_of_vllm_is_not_held_to_the_built_in_engines_cache():
    of = recipe(
        "decode_slots=1000000", "cluster.generators=1", "engine.kind=vllm", "evaluation.decode_slots=4"
    )
    trainer, server = memory_of(of, shape(), of_gpus(24 * GIB))  # which evaluates, too
    assert server.processes[0][0].role == "vLLM server"
    assert server.capacity == round(0.85 * 24 * GIB)
    assert all(device.fits for device in (server, trainer))


def test_a_server_of_vllm_and_the_trainer_add_up_on_a_single_gpu():
    """What vLLM takes, its context beside its share, is not free for the trainer; an error has the share that
    fits, and it does fit.
    """

    def on(gpus, share):
        keys = ("cluster.address=local", "engine.kind=vllm", f"engine.gpu_memory={share}")
        of = recipe("batch.micro=400", *keys)
        return memory_of(of, shape(), gpus)

    (one,) = of_gpus(4 * GIB)
    trainer, server = on([one], 0.2)
    needed = (trainer.total + CONTEXT) / one.memory
    assert (trainer.capacity, server.capacity) == (
        one.free - CONTEXT - server.capacity,
        round(0.2 * one.memory),
    )
    assert trainer.fits
    assert server.fits
    found = [re.escape(f"({int(100 * (1 - needed)) / 100:g} or less fits)"), "or less fits"]
    with pytest.raises(InputError, match=rf"beside vLLM has 0\.6 GiB .*engine\.gpu_memory {found[0]}"):
        check_memory(on([one], 0.7))
    check_memory(on([one], int(100 * (1 - needed)) / 100))
    with pytest.raises(InputError, match="beside vLLM"):
        check_memory(on([one], int(100 * (1 - needed)) / 100 + 0.01))
    # On two GPUs each has its own; on one that is too small for both no share is named.
    check_memory(on([one, one], 0.85))
    with pytest.raises(InputError) as error:
        check_memory(on(of_gpus(trainer.total + 2**20), 0.1))
    assert found[1] not in str(error.value)


def test_the_trainer_has_a_bucket_of_weights_where_vllm_reads_them_from_the_same_gpu():
    keys = "cluster.address=local", "engine.kind=vllm", "engine.gpu_memory=0.2"

    def held(transport, n_gpus, of_shape):
        gpus = [Gpu(str(i), 80 * GIB, 80 * GIB) for i in range(n_gpus)]
        found = memory_of(recipe(*keys, f"engine.transport={transport}"), of_shape, gpus)
        return found[0].processes[0][0].held.get("bucket of weights")

    large = shape(vocab_size=2_000_000)
    assert held("ipc", 1, shape()) == 64 * 2**20
    assert held("ipc", 1, large) == 2_000_000 * 64 * 2  # a tensor that is larger is a bucket
    assert held("file", 1, large) is None
    assert held("ipc", 2, large) is None  # they lie on the worker's GPU


def test_servers_of_vllm_have_a_share_of_the_last_gpus_which_may_be_smaller():
    of = recipe("cluster.address=local", "engine.kind=vllm", "cluster.generators=2")
    _, share = memory_of(of, shape(), of_gpus(80 * GIB, 48 * GIB, 24 * GIB))
    assert share.capacity == round(0.85 * 24 * GIB)


def test_a_model_of_another_form_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match="type 'gpt2' is not known: llama, mistral, qwen2, qwen3 are"):
        shape(model_type="gpt2")


@pytest.mark.parametrize(
    "targets", ["all-linear", "q_proj", '["v_proj", "mlp.down_proj"]', "k_proj", "o_proj"]
)
def test_the_adapters_of_a_memory_are_those_that_are_added(targets):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from scalerl.rl.model.lora import adapter_parameters, add_adapters

    adapted = recipe("lora.rank=4", f"lora.targets={targets}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL))
    parameters = sum(p.numel() for _, p in adapter_parameters(add_adapters(model, adapted.lora, 0)))
    found = trainer_memory(adapted, shape()).held
    assert found["masters"] == found["gradients"] == 4 * parameters


def test_the_keys_to_change_begin_with_what_is_held_where_that_is_the_most():
    def keys(*settings):
        return trainer_memory(recipe(*settings), shape()).keys

    large, of_passes = "lora.rank=100000", "batch.micro_tokens or context"
    assert keys("batch.micro=4096") == f"learner.activation_checkpointing, {of_passes}"
    assert keys(large).startswith("learner.offload_optimiser, lora.rank, ")
    saving = "learner.offload_optimiser=true", "learner.activation_checkpointing=true"
    assert keys(large, *saving) == f"lora.rank, {of_passes}"
