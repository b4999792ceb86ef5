"""Peak memory and time of the loss over a large vocabulary: a chunk of tokens at a time, against all at once.

    python benchmarks/vocabulary_loss.py

One forward and backward pass from the last hidden states to the log-probabilities of the sampled tokens and
their entropies: whole by PyTorch's `log_softmax`, and
in chunks as the learner does (`scalerl.rl.learner.score`). Float32, one thread. Each is a
process of its own, whose peak memory is the operating system's peak of resident memory, less what it was
before the pass: weights and hidden states are in both, and not counted. The ratios are of the chunks to the
whole.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from typing import Any

WAYS = ("whole", "chunked")
TEMPERATURE = 1.0


def measure(way: str, tokens: int, hidden: int, vocabulary: int, chunk: int) -> dict[str, float]:
    """Return MiB above the inputs, seconds, and a check value equal for both ways, of one pass."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from scalerl.rl.learner.score import chunked_log_probs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_attention_heads=4))
    head = model.get_output_embeddings()
    hidden_WD = torch.randn(tokens, hidden, requires_grad=True)
    target_W = torch.randint(vocabulary, (tokens,))
    before, started = _peak_mib(), time.perf_counter()
    if way == "whole":
        logits_WV = torch.nn.functional.linear(hidden_WD, head.weight)
        logp_WV = torch.log_softmax(logits_WV / TEMPERATURE, -1)
        with torch.no_grad():
            entropy_W = -(logp_WV.exp() * logp_WV).sum(-1)
        logp_W = logp_WV[torch.arange(tokens), target_W]
    else:
        inputs = (hidden_WD, head.weight, None, torch.arange(tokens), target_W)
        logp_W, entropy_W = chunked_log_probs(*inputs, TEMPERATURE, chunk)
    logp_W.mean().backward()
    seconds = time.perf_counter() - started
    assert hidden_WD.grad is not None
    check = float(logp_W.mean() + entropy_W.mean() + head.weight.grad.norm() + hidden_WD.grad.norm())
    return {"mib": _peak_mib() - before, "seconds": seconds, "check": check}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="The loss over a large vocabulary")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [args.tokens, args.hidden, args.vocabulary, args.chunk]
    if args.way:
        print(json.dumps(measure(args.way, *sizes)))
        return
    found = {way: _in_a_process(way, sizes) for way in WAYS}
    whole, chunked = (found[way] for way in WAYS)
    if not math.isclose(whole["check"], chunked["check"], rel_tol=1e-4):
        raise SystemExit(f"values and gradients differ: {whole['check']} and {chunked['check']}")
    logits = args.tokens * args.vocabulary * 4 / 2**20
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary:,}, {logits:,.0f} MiB of logits:\n")
    print("| loss | peak memory, MiB | seconds |\n|---|---|---|")
    print(f"| whole | {whole['mib']:,.0f} | {whole['seconds']:.2f} |")
    print(f"| in chunks of {args.chunk} | {chunked['mib']:,.0f} | {chunked['seconds']:.2f} |")
    memory, seconds = (chunked[name] / whole[name] for name in ("mib", "seconds"))
    print(f"| ratio | {memory:.3f} | {seconds:.2f} |")


def _in_a_process(way: str, sizes: list[int]) -> dict[str, float]:
    names = ("--tokens", "--hidden", "--vocabulary", "--chunk")
    options = [word for name, size in zip(names, sizes, strict=True) for word in (name, str(size))]
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, *options], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
