"""The learner: forward, loss, one optimiser step.

    learner.py    on one process or many; load.py makes it; optimiser.py AdamW
    batch.py      from verified groups to the arrays of a step (zero-variance groups are dropped here), to the
                  rows of each pass, and to the figures of the step
    score.py      log-probabilities of sampled tokens; probe.py compares them with the generator's
    sharding.py   FSDP2, tensor parallel, and torch.compile of each layer
    group.py      the ranks as the driver sees them; launch.py torchrun
    checkpoint.py the learner and its model on disk

It may import `scalerl.rl.engine`, `scalerl.rl.checkpoint` and what is below. Imported by `cli`, `rl`,
`rl.loop`, `rl.placement.ray`.
"""
