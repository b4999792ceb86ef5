"""Tiny models with random weights of a large spread, so that their distributions are far from uniform."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from scalerl.rl.algo.length import ForcedInterruption, LengthRule, Marker
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Steps
from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.tasks.chain import END, END_OF_THINKING, PAD, TIME_IS_UP, VOCABULARY, Chain, write_tokenizer
from scalerl.rl.types import Done, Prompt, Reward, Rollout

TOKENS = {
    "vocab_size": len(VOCABULARY),
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(PAD),
    "initializer_range": 0.3,
}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, SHAPE),
    "mistral": (MistralConfig, SHAPE),
    "qwen2": (Qwen2Config, SHAPE),
    "qwen3": (Qwen3Config, {**SHAPE, "head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {**SHAPE, **EXPERTS, "head_dim": 16}),
    "mixtral": (MixtralConfig, {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": (GemmaConfig, {**SHAPE, "head_dim": 8}),  # tied, and its embeddings are scaled
    "gpt2": (GPT2Config, GPT2_SHAPE),
    "gpt_neox": (GPTNeoXConfig, SHAPE),  # attention and MLP side by side, biases, part of a head rotated
    "opt": (OPTConfig, {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32}),  # positions with an offset
    "granite": (GraniteConfig, {**SHAPE, "logits_scaling": 8.0}),
    "cohere": (CohereConfig, {**SHAPE, "logit_scale": 0.0625}),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """These models are too small for threads to help."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _forked_with_all():
    """One process has loaded all that trains, and the kernels: all tests fork workers from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalerl.rl.workers.processes._PRELOAD", "scalerl.study.run.preload")
        yield


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """A function that saves a random model with the tokenizer of `chain`, and returns its folder."""

    def save(
        architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> str:
        folder = str(tmp_path_factory.mktemp(architecture))
        torch.manual_seed(seed)
        config, shape = FAMILIES[architecture]
        model: Any = AutoModelForCausalLM.from_config(config(**{**TOKENS, **shape, **changes})).to(dtype)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def llama_folder(save_model):
    return save_model("llama")


@pytest.fixture(scope="session")
def tiny_recipe(llama_folder):
    """Two groups of four a step, in rows for eight steps, with completions of 1 to 46 tokens."""
    return Recipe(
        model=llama_folder,
        task=Chain(k_max=3, heldout_per_length=4, train_per_length=40),
        budget=Steps(12),
        batch=BatchSize(prompts=2, samples=4, micro=8),
        context=Context(prompt=8, thinking=30, answer=15),
        length=ForcedInterruption(low=2, high=30, phrase="! </think>"),
        optimiser=AdamW(lr=3e-3, warmup_steps=2),
        decode_slots=64,
    )


def _parity(rollout):
    right = bool(rollout.token_T[rollout.sampled_T].sum() % 2) and not rollout.truncated
    return Reward(1.0 if right else -1.0, right)


def _one_by_one(verify):
    return lambda groups: Done([[verify(rollout) for rollout in group] for group in groups])


@pytest.fixture(scope="session")
def by_parity():
    """A reward of a rollout that any model gets about half of the time."""
    return _parity


@pytest.fixture(scope="session")
def judge_by():
    """A function that makes the judge of groups from a reward of a rollout."""
    return _one_by_one


@pytest.fixture(scope="session")
def start_run():
    """A function that makes the loop of a recipe, inline, with its generator and its learner.

    `verify` gives a rollout its reward; `watch` may put something around the generator.
    """

    def make(recipe, verify=_parity, watch=lambda generator: generator, seed=0):
        recipe = replace(recipe, seed=seed)
        pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, seed)
        generator = watch(load_generator(recipe, recipe.model, seed, recipe.decode_slots))
        learner = load_learner(recipe, recipe.model)
        loop = Pipeline(recipe, pool, generator, learner, _one_by_one(verify)).steps()
        return loop, generator, learner

    return make


@pytest.fixture(scope="session")
def rule():
    """Thinking is interrupted after 6 to 20 tokens by `! </think>`, and 20 tokens are left for the answer."""
    marker, time_is_up = VOCABULARY.index(END_OF_THINKING), VOCABULARY.index(TIME_IS_UP)
    return LengthRule(20, 20, Marker((marker,)), (time_is_up, marker), (6, 20))


@pytest.fixture(scope="session")
def make_generator(rule):
    """A function that makes a generator from a model's folder."""

    def make(
        folder: str,
        rows: int = 4,
        temperature: float = 1.0,
        fp32_logits: bool = True,
        seed: int = 0,
        length: LengthRule = rule,
        **cut: Any,
    ) -> TorchGenerator:
        sampling = Sampling(temperature, fp32_logits, seed, 24, length, VOCABULARY.index(END), **cut)
        return TorchGenerator(load_model(folder), load_tokenizer(folder), sampling, rows)

    return make


@pytest.fixture(scope="session")
def uneven_prompts():
    """Six prompts of 1 to 11 tokens."""
    symbols = ["3", "+", "4", "*", "7", "-", "9", "+", "2", "="]
    return [
        Prompt(f"p/{n}/0", " ".join(symbols[-n:] + ["."] * max(0, n - 10)), "0") for n in (4, 1, 10, 2, 11, 7)
    ]


@pytest.fixture
def make_rollout():
    """A function that makes a rollout by hand; `inserted` are the places of inserted tokens."""

    def make(
        length: int = 3,
        inserted: tuple[int, ...] = (),
        truncated: bool = False,
        prompt_T: tuple[int, ...] = (9, 6, 10, 5),
        token_T: tuple[int, ...] | None = None,
        logp_T: np.ndarray | None = None,
        version: int = 0,
        prompt: str = "p",
    ) -> Rollout:
        sampled_T = ~np.isin(np.arange(length), inserted)
        logp_T = np.full(length, -1.0, dtype=np.float32) if logp_T is None else logp_T
        return Rollout(
            prompt=Prompt(prompt, "3 + 4 =", "7"),
            epoch=0,
            sample=0,
            prompt_T=np.array(prompt_T),
            token_T=np.arange(length) % 10 + 9 if token_T is None else np.array(token_T),
            sampled_T=sampled_T,
            logp_T=np.where(sampled_T, logp_T, 0).astype(np.float32),
            version_T=np.full(length, version, dtype=np.int32),
            first_version=version,
            truncated=truncated,
            interrupted=bool(inserted),
        )

    return make


@pytest.fixture
def jsonl(tmp_path):
    """A function that writes rows to a JSONL file and returns its path."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
