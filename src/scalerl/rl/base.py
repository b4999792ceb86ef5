"""The base model of the demonstration: a tiny causal LM trained on worked examples, careful, then imperfect.

From careful examples it learns the arithmetic; from the imperfect ones, which come last, it takes the habit
of giving up early, the slips and the rambling. So it can do better than it does, which is what RL is for.

It is a Hugging Face folder (config, safetensors, tokenizer) like any other, so that what trains it further
reads it as it would read any model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch import nn

from scalerl.record import dumps, write_atomically
from scalerl.rl.tasks.chain import END, PAD, VOCABULARY, Demonstrations, write_tokenizer


@dataclass(frozen=True)
class BaseModel:
    """How the base model is made: its size, and its training on demonstrations."""

    demonstrations: Demonstrations
    hidden_size: int = 64
    intermediate_size: int = 176
    layers: int = 2
    heads: int = 4
    positions: int = 64
    careful_loss: float = 0.05
    """The careful examples end once their loss, smoothed over 50 steps, is below this (nats per token)."""
    max_careful_steps: int = 4000
    imperfect_steps: int = 200
    batch: int = 32
    lr: float = 1e-3
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """A name that changes with anything that makes the model another one."""
        settings = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(f"1 {torch.__version__} {settings}".encode(), digest_size=6).hexdigest()


@dataclass
class BaseProgress:
    """How far the base model is."""

    step: int
    loss: float


def build_base(spec: BaseModel, cache: Path, progress: Callable[[BaseProgress], None] | None = None) -> Path:
    """The folder of the base model; trained at the first call, found in `cache` at later ones.

    `base.json` in the folder holds what it cost, which is no part of the compute of RL.
    """
    folder = cache / f"chain-base-{spec.fingerprint}"
    if (folder / "base.json").is_file():
        return folder
    aside = cache / f".{folder.name}.{os.getpid()}"
    aside.mkdir(parents=True, exist_ok=True)
    try:
        started = time.perf_counter()
        model, steps, loss = _train(spec, progress)
        model.save_pretrained(aside)  # pyright: ignore[reportCallIssue]
        write_tokenizer(str(aside))
        cost = {"seconds": time.perf_counter() - started, "steps": steps, "loss": loss, "spec": asdict(spec)}
        write_atomically(aside / "base.json", dumps(cost, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _train(spec: BaseModel, progress: Callable[[BaseProgress], None] | None) -> tuple[nn.Module, int, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(spec.seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.positions,
        # Rotary positions, so that one circuit serves every step: step j always comes as far behind operation
        # j. The default base of 10,000 is for long texts and the default spread of 0.02 for wide models; both
        # cost this one thousands of steps.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=0.01, betas=(0.9, 0.98))
    careful = replace(spec.demonstrations, give_up=0.0, slip=0.0, ramble=0.0)
    rng = Random(spec.seed)

    def train(demonstrations: Demonstrations, step: int, lr: float) -> float:
        for group in optimiser.param_groups:
            group["lr"] = lr
        loss = _supervised_loss(model, demonstrations, spec.batch, rng)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if progress and step % 20 == 0:
            progress(BaseProgress(step, loss.item()))
        return loss.item()

    step, smoothed = 0, 3.0
    while smoothed > spec.careful_loss and step < spec.max_careful_steps:
        smoothed += (train(careful, step, spec.lr * min(1.0, (step + 1) / 100)) - smoothed) / 50
        step += 1
    for left in range(spec.imperfect_steps, 0, -1):
        smoothed += (
            train(spec.demonstrations, step, spec.lr * left / spec.imperfect_steps / 2) - smoothed
        ) / 50
        step += 1
    return model, step, smoothed


def _supervised_loss(model: nn.Module, demonstrations: Demonstrations, n: int, rng: Random) -> torch.Tensor:
    """Cross-entropy of the completions of `n` demonstrations, in nats per token."""
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    pairs = [demonstrations.sample(rng) for _ in range(n)]
    rows = [([ids[word] for word in p.split()], [ids[word] for word in c.split()]) for p, c in pairs]
    extent = max(len(p) + len(c) for p, c in rows)
    token_BT = torch.zeros(n, extent, dtype=torch.long)
    label_BT = torch.full((n, extent), -100)  # prompts and padding are not trained
    for row, (p, c) in enumerate(rows):
        token_BT[row, : len(p) + len(c)] = torch.tensor(p + c)
        label_BT[row, len(p) : len(p) + len(c)] = torch.tensor(c)
    logits_BTV = model(input_ids=token_BT, attention_mask=torch.ones_like(token_BT)).logits
    return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), label_BT[:, 1:].flatten())
