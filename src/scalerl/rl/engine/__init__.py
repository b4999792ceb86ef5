"""Decoding: completions sampled by continuous batching.

    build.py      the generator of a recipe, checked against model, tokenizer and memory
    sampling.py   settings, random numbers and requests of completions
    generator.py  one decode step after the other; slots.py what the decode slots hold
    engine.py     the model and its KV cache
    ordered.py    groups completed in any order, taken in order of admission
    vllm/         the same by vLLM, in workers (worker.py runs in each) or servers

It may import `scalerl.rl.kernels`, `scalerl.rl.model`, `scalerl.rl.sync` and what is below. Imported by
`rl`, `rl.learner`, `rl.loop`, `rl.placement`, `rl.placement.ray`.
"""
