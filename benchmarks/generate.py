"""How fast is the decoder? Tokens per second against transformers' `generate`, measured side by side.

    python benchmarks/generate.py [--threads 1] [--rows 256] [--new 32] [--repeats 7] [--only llama]

Two models of random weights, temperature 1, no top-k or top-p, prompts of 4 to 26 tokens, and four jobs: as
many prompts as there are rows, to exactly `new` tokens (the end token being ignored), and to where the model
ends them, at 2 x `new` tokens at the latest, where the tokens up to the end are counted on all sides; a
sixteenth of the prompts with 16 samples each, as RL has it, to `new` tokens; and four times as many of
these, to the end. `generate` takes `rows` completions at a time, padded on the left; `--compile` adds it with
its static cache compiled. Everything from the texts of the prompts to the tokens of the completions is timed.
The ways take turns, so that a shared machine slows all alike; CPU time with one thread, wall time with more.

The floor is the time of the bare matrix products of a job in passes as large as ours: the tokens of the
prompts without padding, then one token of every row at a time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.engine.engine import TransformersEngine
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.engine.sampling import stream_keys
from scalerl.rl.kernels.fused import MOST_TOKENS
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.chain import END, END_OF_THINKING, FILLER, PAD, VOCABULARY, Chain, write_tokenizer
from scalerl.rl.types import Prompt

SMALL = {
    "vocab_size": len(VOCABULARY),
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": VOCABULARY.index(PAD),
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama, 2 layers, hidden 64": LlamaConfig(
        **SMALL,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_key_value_heads=4,
        head_dim=16,
    ),
    "qwen3, 4 layers, hidden 128": Qwen3Config(
        **SMALL,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
}
LONGEST_PROMPT = 26
FLOOR = "bare matrix products"
PARTS = {
    "_pass": "attention, RMSNorm and SwiGLU",
    "mm": "matrix products",
    "addmm_": "matrix products",
    "log_probs_TV": "head and log-softmax",
    "_sample": "sampling",
    "submit": "tokenising, and keys of the random numbers",
    "_finish": "making rollouts",
}
"""Functions, and the part of the report that their time counts towards: cumulative time, except for `_pass`,
which calls the C kernels and counts only its own."""

Call = Callable[[], int]
"""Does a job and returns the number of sampled tokens."""


@dataclass(frozen=True)
class Job:
    """Prompts, each sampled `n_samples` times up to `new` tokens or until `end`."""

    name: str
    prompts: list[Prompt]
    n_samples: int
    rows: int
    new: int
    end: int | None = None


def make_ours(model: Any, tokenizer: Any, job: Job, fused: bool) -> Call:
    marker = Marker((VOCABULARY.index(END_OF_THINKING),))
    end = -1 if job.end is None else job.end  # -1 is no token
    sampling = Sampling(1.0, True, 0, LONGEST_PROMPT, LengthRule(job.new, 0, marker), end)
    generator = TorchGenerator(model, tokenizer, sampling, job.rows)
    if not fused:
        generator._engine = TransformersEngine(model, job.rows, LONGEST_PROMPT + job.new)

    def sample() -> int:
        before = generator.counters.tokens
        for prompt in job.prompts:
            generator.submit(prompt, 0, job.n_samples)
        generator.collect(len(job.prompts))
        return generator.counters.tokens - before

    return sample


def make_theirs(model: Any, tokenizer: Any, job: Job, **cache: Any) -> Call:
    texts = [prompt.text for prompt in job.prompts for _ in range(job.n_samples)]

    def sample() -> int:
        return sum(batch(texts[start : start + job.rows]) for start in range(0, len(texts), job.rows))

    def batch(texts: list[str]) -> int:
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        tokens_BT = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.new,
            eos_token_id=job.end,
            **cache,
        )[:, inputs["input_ids"].shape[1] :]
        if job.end is None:
            return tokens_BT.numel()
        ended_BT = (tokens_BT == job.end).cumsum(1)
        return int(((ended_BT == 0) | ((ended_BT == 1) & (tokens_BT == job.end))).sum())

    return sample


def make_products(model: Any, tokenizer: Any, job: Job, sampled: int) -> Call:
    """Return a call that does only the matrix products of a job of `sampled` tokens."""
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv, gate_up = (hidden, (heads + 2 * kv_heads) * dim), (hidden, 2 * inner)
    shapes = [qkv, (heads * dim, hidden), gate_up, (inner, hidden)] * config.num_hidden_layers
    matrices = [torch.randn(n, k).t() for k, n in [*shapes, (hidden, config.vocab_size)]]
    texts = [prompt.text for prompt in job.prompts]
    prompts = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    first = len(texts) * job.n_samples  # tokens sampled from the prompts' own pass
    passes = [min(MOST_TOKENS, prompts - start) for start in range(0, prompts, MOST_TOKENS)]
    passes += [job.rows] * round((sampled - first) / job.rows)
    room = {m: [(torch.randn(m, len(w)), torch.empty(m, w.shape[1])) for w in matrices] for m in set(passes)}

    @torch.inference_mode()
    def multiply() -> int:
        for m in passes:
            for (x, out), w in zip(room[m], matrices, strict=True):
                torch.mm(x, w, out=out)
        return sampled

    return multiply


def measure(calls: dict[str, Call], clock: Callable[[], float], repeats: int) -> dict[str, list[float]]:
    """Return tokens per second of each call; calls take turns, `repeats` times after a warm-up turn."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            started = clock()
            tokens = call()
            if turn:
                rates[name].append(tokens / (clock() - started))
    return rates


def shares(call: Call, repeats: int) -> dict[str, float]:
    """Return each part's share of the time of a call, as profiled (profiling itself takes time)."""
    profile = cProfile.Profile()
    for _ in range(repeats):
        profile.runcall(call)
    stats: Any = pstats.Stats(profile)
    found: dict[str, float] = {}
    for (_, _, function), (_, _, own, cumulative, _) in stats.stats.items():
        for name, part in PARTS.items():
            if function == name or f".{name}>" in function or f"'{name}'" in function:
                seconds = own if name == "_pass" else cumulative
                found[part] = found.get(part, 0.0) + seconds / stats.total_tt
    return found | {"the rest: rows, Python": 1.0 - sum(found.values())}


def report(config: PreTrainedConfig, job: Job, tokenizer: Any, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    models = [AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval() for _ in range(2)]
    for other in models:
        other.load_state_dict(model.state_dict())
    fused = make_ours(models[0], tokenizer, job, fused=True)
    calls = {
        "scalerl, fused": fused,
        "scalerl, transformers": make_ours(models[1], tokenizer, job, fused=False),
        "generate, static cache": make_theirs(model, tokenizer, job, cache_implementation="static"),
        "generate, dynamic cache": make_theirs(model, tokenizer, job),
        FLOOR: make_products(model, tokenizer, job, fused()),
    }
    if arguments.compile:
        how = CompileConfig(mode="default", fullgraph=False, dynamic=False)
        setattr(how, "_compile_all_devices", True)  # noqa: B010 - on a CPU it is off by default
        settings: dict[str, Any] = {"cache_implementation": "static", "compile_config": how}
        calls["generate, compiled"] = make_theirs(model, tokenizer, job, **settings)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    rates = measure(calls, clock, arguments.repeats)
    best = {name: max(found) for name, found in rates.items()}
    theirs = max(rate for name, rate in best.items() if name.startswith("generate"))
    print(f"\n{job.name}\n  {'tokens/s':>32s}{'median':>10s}{'to generate':>13s}{'of the floor':>14s}")
    for name, found in rates.items():
        usual, share = statistics.median(found), best[name] / best[FLOOR]
        print(f"  {name:24s}{best[name]:8,.0f}{usual:10,.0f}{best[name] / theirs:12.2f}x{share:14.0%}")
    parts = shares(fused, arguments.repeats)
    print(
        "  " + "; ".join(f"{share:.0%} {part}" for part, share in sorted(parts.items(), key=lambda p: -p[1]))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="also with generate's static cache compiled")
    parser.add_argument("--only", default="", help="models whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    ordered = Chain(k_max=12).prompts("train")
    filled = [ordered[i] for i in np.argsort(stream_keys(last=[prompt.id for prompt in ordered]))]
    prompts = [replace(prompt, text=prompt.text.rstrip(f" {FILLER}")) for prompt in filled]
    rows, new, end = arguments.rows, arguments.new, VOCABULARY.index(END)
    jobs = [
        Job(f"{rows} prompts x 1, {new} tokens", prompts[:rows], 1, rows, new),
        Job(f"{rows} prompts x 1, to the end", prompts[:rows], 1, rows, 2 * new, end),
        Job(f"{rows // 16} prompts x 16, {new} tokens", prompts[: rows // 16], 16, rows, new),
        Job(f"{rows // 4} prompts x 16, to the end", prompts[: rows // 4], 16, rows, 2 * new, end),
    ]
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), best and median of {arguments.repeats}")
    for name, config in MODELS.items():
        if name.startswith(arguments.only):
            print(f"\n== {name}")
            for job in jobs:
                report(config, job, tokenizer, arguments)


if __name__ == "__main__":
    main()
