"""Tiny models with random weights of a large spread, so that their distributions are far from uniform."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from scalerl.rl.generator import Sampling, TorchGenerator
from scalerl.rl.length import LengthRule, Marker
from scalerl.rl.model import load_model, load_tokenizer
from scalerl.rl.tasks.chain import END, END_OF_THINKING, PAD, TIME_IS_UP, VOCABULARY, write_tokenizer
from scalerl.rl.types import Prompt, Rollout

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
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}

MAKERS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **changes: LlamaConfig(**{**TOKENS, **SHAPE, **changes}),
    "mistral": lambda **changes: MistralConfig(**{**TOKENS, **SHAPE, **changes}),
    "qwen2": lambda **changes: Qwen2Config(**{**TOKENS, **SHAPE, **changes}),
    "qwen3": lambda **changes: Qwen3Config(**{**TOKENS, **SHAPE, "head_dim": 16, **changes}),
    "qwen3_moe": lambda **changes: Qwen3MoeConfig(**{**TOKENS, **SHAPE, **EXPERTS, **changes}),
    "gpt2": lambda **changes: GPT2Config(**{**TOKENS, **GPT2_SHAPE, **changes}),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """These models are too small for threads to help."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """A function that saves a random model with the tokenizer of `chain`, and returns its folder."""

    def save(
        architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> str:
        folder = str(tmp_path_factory.mktemp(architecture))
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(MAKERS[architecture](**changes)).to(dtype)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def llama_folder(save_model):
    return save_model("llama")


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
    ) -> TorchGenerator:
        sampling = Sampling(temperature, fp32_logits, seed, 24, length, VOCABULARY.index(END))
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
            draw=0,
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
