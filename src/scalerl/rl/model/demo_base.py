"""The base model of the demonstration: a tiny causal LM trained on worked examples, first perfect ones.

Perfect examples teach it the arithmetic; the imperfect ones that follow teach it to give up early, to slip
and to ramble. So its ability exceeds its performance, and RL can bring that out.

It is saved as a Hugging Face folder (config, safetensors, tokenizer) and loaded like any other model.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from scalerl.errors import InputError, WriteError
from scalerl.files import write_atomically
from scalerl.jsonl import dumps
from scalerl.rl.model.causal_lm import FlopCount
from scalerl.rl.tasks.chain import END, PAD, VOCABULARY, Chain, Demonstrations, write_tokenizer


@dataclass(frozen=True)
class BuildProgress:
    """The progress of building a model."""

    share: float
    """Estimated share of the work that is done."""
    text: str
    milestone: bool = True
    """Whether to print it as a line if no progress bar can be drawn."""


@contextmanager
def made_aside(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, and rename it to `folder` after the block has filled it.

    So a model is never found half made, even if its making is interrupted or two processes make it at once.
    `last` is a file that a complete folder has.

    Raises:
        WriteError: the folder cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)  # fails if a link is in its place
        yield aside
        try:
            aside.rename(folder)
        except OSError:  # fails too if another process has just made the same model, which is then used
            if not (folder / last).is_file():
                raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        why = getattr(error, "strerror", None) or error
        raise WriteError(f"{folder}: the model could not be saved ({why})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


CHAIN_BASE = "chain-base"
USUAL_STEPS = 1200


@dataclass(frozen=True)
class BaseModel:
    """The size of the base model and the settings of its training."""

    demonstrations: Demonstrations
    hidden_size: int = 64
    intermediate_size: int = 176
    layers: int = 2
    heads: int = 4
    experts: int = 0
    """Experts of a block, each with half the `intermediate_size`; a token uses two. 0 is a dense model."""
    positions: int = 64
    careful_loss: float = 0.05
    """Perfect examples end once their loss, smoothed over 50 steps, is below this, in nats per token."""
    max_careful_steps: int = 4000
    imperfect_steps: int = 200
    batch: int = 32
    lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise InputError(
                f"{CHAIN_BASE}: hidden_size {self.hidden_size} is no multiple of {self.heads} heads"
            )
        if self.experts == 1:
            raise InputError(f"{CHAIN_BASE}: experts must be at least {_EXPERTS_MET}, which a token meets")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the model."""
        values = asdict(self)
        if not self.experts:  # the hash of dense models is older than this field: cached ones must be found
            del values["experts"]
        settings = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(f"1 {torch.__version__} {settings}".encode(), digest_size=6).hexdigest()


_OPTIONS = ("seed", "hidden_size", "intermediate_size", "layers", "heads", "experts", "imperfect_steps")
_EXPERTS_MET = 2


def base_folder(spec: BaseModel, cache: Path) -> Path:
    """Return the folder of a base model, whether or not it exists."""
    return cache / f"chain-base-{spec.fingerprint}"


def base_spec(name: str, task: Chain, thinking: int) -> BaseModel:
    """Return the base model for a name such as `chain-base:seed=1,layers=3,hidden_size=128,thinking=16`.

    Options are integer fields of `BaseModel`; `intermediate_size` keeps its ratio to `hidden_size` unless it
    is given. The option `thinking` is the token budget of the demonstrations and replaces the recipe's, so
    that runs with different budgets can start from one model.

    Raises:
        InputError: an option is unknown, or not a whole number of 1 or more (the seed may be 0).
    """
    options: dict[str, int] = {}
    for option in filter(None, name.partition(":")[2].split(",")):
        key, _, value = option.partition("=")
        if key not in (*_OPTIONS, "thinking"):
            raise InputError(f"model {name}: no option {key!r}; there are {', '.join(_OPTIONS)}, thinking")
        if not (value.isdecimal() and (int(value) or key == "seed")):
            raise InputError(f"model {name}: {key} must be a whole number of 1 or more, found {value!r}")
        options[key] = int(value)
    if "hidden_size" in options:
        ratio = BaseModel.intermediate_size / BaseModel.hidden_size
        options.setdefault("intermediate_size", round(options["hidden_size"] * ratio))
    demonstrations = Demonstrations(task, options.pop("thinking", thinking))
    return BaseModel(demonstrations, **options)


def build_base(spec: BaseModel, cache: Path, progress: Callable[[BuildProgress], None] | None = None) -> Path:
    """Return the folder of the base model; train the model unless `cache` has it.

    Its `base.json` has the cost of this training, which does not count as compute of RL.
    """
    folder = base_folder(spec, cache)
    if (folder / "base.json").is_file():
        return folder
    with made_aside(folder, "base.json") as aside:
        started = time.perf_counter()
        model, cost = _train(spec, progress)
        model.save_pretrained(aside)  # pyright: ignore[reportCallIssue]
        write_tokenizer(str(aside))
        made = {"seconds": time.perf_counter() - started, **cost, "spec": asdict(spec)}
        write_atomically(aside / "base.json", dumps(made, indent=2) + "\n")
    return folder


def _train(
    spec: BaseModel, progress: Callable[[BuildProgress], None] | None
) -> tuple[nn.Module, dict[str, float]]:
    torch.set_num_threads(1)  # the result must not depend on the number of cores
    torch.manual_seed(spec.seed)
    model = new_model(spec)
    flop_count = FlopCount.of(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=0.01, betas=(0.9, 0.98))
    perfect = replace(spec.demonstrations, give_up=0.0, slip=0.0, ramble=0.0)
    rng = Random(spec.seed)
    step, flops, smoothed = 0, 0.0, 3.0

    def train(demonstrations: Demonstrations, lr: float) -> None:
        nonlocal step, flops, smoothed
        for group in optimiser.param_groups:
            group["lr"] = lr
        token_BT, label_BT, length_B = _demonstration_batch(demonstrations, spec.batch, rng)
        logits_BTV = model(input_ids=token_BT, attention_mask=torch.ones_like(token_BT)).logits
        loss = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), label_BT[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if progress and step % 20 == 0:
            share = min(step / USUAL_STEPS, 1.0)  # an estimate: the number of steps depends on the loss
            progress(BuildProgress(share, f"step {step}  loss {loss.item():.2f}", step % 200 == 0))
        step += 1
        flops += 3 * flop_count.forward(length_B.sum(), (length_B * (length_B + 1) / 2).sum())
        smoothed += (loss.item() - smoothed) / 50

    while smoothed > spec.careful_loss and step < spec.max_careful_steps:
        train(perfect, spec.lr * min(1.0, (step + 1) / 100))
    for left in range(spec.imperfect_steps, 0, -1):
        train(spec.demonstrations, spec.lr * left / spec.imperfect_steps / 2)
    return model, {"steps": step, "loss": smoothed, "flops": flops}


def new_model(spec: BaseModel) -> nn.Module:
    """Return the model with random initial weights: a Llama, or with experts a Qwen3-MoE."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    shape = dict[str, Any](
        vocab_size=len(VOCABULARY),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.positions,
        # With rotary positions one circuit serves every step, because step j is at a fixed distance from
        # operation j. The default base of 10,000 suits long texts, and the default initializer range of 0.02
        # wide models; both cost this model thousands of steps.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )
    if not spec.experts:
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    shape |= {
        "head_dim": spec.hidden_size // spec.heads,
        "num_experts": spec.experts,
        "num_experts_per_tok": _EXPERTS_MET,
        "moe_intermediate_size": spec.intermediate_size // _EXPERTS_MET,
        "norm_topk_prob": True,  # as in Qwen's models
    }
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape))


def _demonstration_batch(
    demonstrations: Demonstrations, n: int, rng: Random
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return tokens (n, T), labels, which are -100 on prompts and padding, and lengths (n,)."""
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    pairs = [demonstrations.sample(rng) for _ in range(n)]
    rows = [([ids[word] for word in p.split()], [ids[word] for word in c.split()]) for p, c in pairs]
    length_B = np.array([len(p) + len(c) for p, c in rows], dtype=float)
    token_BT = torch.zeros(n, int(length_B.max()), dtype=torch.long)
    label_BT = torch.full_like(token_BT, -100)
    for row, (p, c) in enumerate(rows):
        token_BT[row, : len(p) + len(c)] = torch.tensor(p + c)
        label_BT[row, len(p) : len(p) + len(c)] = torch.tensor(c)
    return token_BT, label_BT, length_B
