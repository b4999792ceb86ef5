"""Every setting of a recipe, and the recipe itself.

    recipe.py     Recipe, and how it is read from TOML and config.json
    settings.py   batch, context, budget, evaluation, placement, checkpoints, timeouts
    cluster.py, fsdp.py, vllm.py, tracking.py, health.py, lora.py, optimiser.py    one table each
    form.py, toml.py     values written by hand, checked with messages in the words of their writer

It may import `scalerl.rl.algo` and `scalerl.rl.tasks`. What implements a setting imports it.
"""
