"""The learner: forward, loss, one optimiser step.

    learner.py    on one process or many; load.py makes it; optimiser.py AdamW
    batch.py      from verified groups to the arrays of a step; zero-variance groups are dropped here
    passes.py     which completions go through the model together, on which rank
    score.py      log-probabilities of sampled tokens; probe.py compares them with the generator's
    vocabulary.py the same from hidden states, a chunk of the logits at a time
    blocks.py     the layers of a model, and torch.compile of each
    stats.py      the sums over the tokens of a step, and its figures
    sharding.py   FSDP2 and tensor parallel; group.py the ranks as the driver sees them; launch.py torchrun
    checkpoint.py the learner and its model on disk

It may import `scalerl.rl.engine`, `scalerl.rl.checkpoint` and what is below. Imported by `cli`, `rl`,
`rl.loop`, `rl.placement.ray`.
"""
