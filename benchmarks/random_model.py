"""A model of the Qwen3 shape with random weights, and a tokenizer: for benchmarks that need no training."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch

from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.chain import END, VOCABULARY, write_tokenizer

END_TOKEN = VOCABULARY.index(END)


def random_qwen3(dtype: torch.dtype, device: torch.device, spread: float, **shape: Any) -> Any:
    """Return a model whose logits have standard deviation `spread`; `shape` are fields of Qwen3Config."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(bos_token_id=None, eos_token_id=END_TOKEN, pad_token_id=0, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    # The last norm gives hidden states a mean square of one.
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=spread / math.sqrt(config.hidden_size))
    return model


def chain_tokenizer() -> Any:
    """Return the tokenizer of the built-in task: the first few tokens of any vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        return load_tokenizer(folder)
