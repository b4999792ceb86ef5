"""A tiny model, data and an environment where the answer of a tool decides: a digit, told as a letter.

The model is warmed up on what a completion may look like, so that groups have a signal: half of the time it
calls the tool, and then often writes the digit of the letter; else it guesses.
"""

import json
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalerl.rl.algo.length import NoLengthControl
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Checkpointing, Context, Evaluation, Samples, Steps
from scalerl.rl.tasks.environment import Environment
from scalerl.rl.tasks.verifiers import Exact
from scalerl.rl.types import Limits

CALL = '<tool_call>{"name":"draw"}</tool_call>'
WORDS = ["<pad>", "<eos>", "</think>", CALL, *"abcdefgh", *"0123456789", *"ABCDEFGHIJ"]
CLASS = """
import time

class Drawing:
    def reset(self, answer, **row):
        self._answer = answer

    def draw(self):
        '''Draw a digit.'''
        return "ABCDEFGHIJ"[int(self._answer)]
"""


def write_files(folder: Path, code: str = CLASS) -> tuple[Path, Path]:
    """Write data and environment into a folder; return their paths."""
    rng = Random(0)
    names = [f"{a} {b}" for a in "abcdefgh" for b in "abcdefgh"]
    rows = [{"prompt": name, "answer": str(rng.randrange(10))} for name in names]
    data, environment = folder / "digits.jsonl", folder / "drawing.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment.write_text(code)
    return data, environment


def drawing_model(folder: Path, steps: int = 60) -> Path:
    """Save the model, warmed up for so many steps; a few seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=48, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=32,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model, rng = LlamaForCausalLM(config), Random(1)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        tokens = torch.tensor([_example(rng) for _ in range(64)])
        loss = torch.nn.functional.cross_entropy(
            model(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:], ignore_index=0
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)
    return folder


def _example(rng: Random) -> list[int]:
    """Two letters, then a guess; or a call, its answer, and the digit of that or another."""
    digit, other = rng.choice("0123456789"), rng.choice("0123456789")
    text = [rng.choice("abcdefgh"), rng.choice("abcdefgh")]
    if rng.random() < 0.5:
        text += [CALL, "<eos>", "ABCDEFGHIJ"[int(digit)], digit if rng.random() < 0.6 else other, "<eos>"]
    else:
        text += [other, "<eos>", "<pad>", "<pad>", "<pad>"]
    return [WORDS.index(word) for word in text]


def drawing_recipe(model: Path, data: Path, environment: Path, **changes) -> Recipe:
    """Two groups of four a step, completions of three turns at most."""
    task = Environment(
        str(data),
        environment=f"{environment}:Drawing",
        answer="answer",
        turns=changes.pop("turns", 3),
        heldout=16,
        chat_template=False,
        verifier=Exact(),
        limits=Limits(seconds=60.0, workers=1),
    )
    settings = {
        "budget": Steps(6),
        "length": NoLengthControl(),
        "context": Context(prompt=4, thinking=8, answer=2),
        "batch": BatchSize(prompts=2, samples=4, micro=8),
        "optimiser": AdamW(lr=1e-3, warmup_steps=2),
        "decode_slots": 16,
        "evaluation": Evaluation(count=1, samples=1, forecast_at=()),
        "checkpoint": Checkpointing(steps=2, minutes=0),
        "samples": Samples(evaluation=4, every=1, training=2),
        **changes,
    }
    return Recipe(model=str(model), task=task, **settings)
