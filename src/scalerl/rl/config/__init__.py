"""Every setting of a recipe, and the recipe itself.

    recipe.py     Recipe, and how it is read from TOML and config.json
    cluster.py    the table `[cluster]`, with `Fsdp2`; engine.py `[engine]`, with `Vllm`; health.py `[health]`
    optimiser.py  the table `[optimiser]`, with the learning rate
    settings.py   all other tables: batch, context, budget, evaluation, placement, checkpoints ...
    form.py       TOML and overrides, checked against dataclasses

It may import `scalerl.rl.algo` and `scalerl.rl.tasks`. Imported by `cli`, `plan`, `rl`, `rl.checkpoint`,
`rl.engine`, `rl.engine.vllm`, `rl.health`, `rl.learner`, `rl.loop`, `rl.model`, `rl.placement`,
`rl.placement.ray`, `rl.sync`, `rl.tracking`, `rl.verify`, `rl.workers.ray`, `study`.
"""
