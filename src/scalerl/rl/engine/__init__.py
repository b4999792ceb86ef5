"""Decoding: completions sampled by continuous batching.

    build.py      the generator of a recipe, checked against model, tokenizer and memory
    sampling.py   settings, random numbers and requests of completions
    generator.py  the built-in generator, one decode step at a time; slots.py its decode slots
    engine.py     the model and its KV cache
    ordered.py    groups that complete in any order and are taken in order of admission
    vllm/         generation by vLLM, in workers (worker.py runs in each) or servers

It may import `scalerl.rl.kernels`, `scalerl.rl.model`, `scalerl.rl.sync` and what is below. Imported by
`rl`, `rl.learner`, `rl.loop`, `rl.placement`, `rl.placement.ray`.
"""
