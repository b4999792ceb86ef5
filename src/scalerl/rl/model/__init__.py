"""Models in Hugging Face format: loading, log-probabilities, LoRA, and the models that this package makes.

    causal_lm.py     models, tokenizers, log-probabilities; packed_attention.py, routing.py: parts of models
    lora.py          adapters; weights.py: the stream of named tensors that is published
    named.py         the model that a recipe names, such as SmolLM2; demo_base.py makes the demonstration's
    shape.py         sizes from config.json without torch; out_of_memory.py: failed allocations
    cache_blocks.py  allocation of the blocks of a KV cache, for any engine

It may import `scalerl.rl.config` and what is below. Imported by `cli`, `rl`, `rl.checkpoint`, `rl.engine`,
`rl.engine.vllm`, `rl.kernels`, `rl.learner`, `rl.loop`, `rl.placement`, `rl.placement.ray`, `rl.sync`,
`rl.verify`, `rl.workers.ray`, `study`.
"""
