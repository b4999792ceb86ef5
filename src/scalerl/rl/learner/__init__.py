"""The learner: forward, loss, one optimiser step.

    learner.py    the learner, on one process or many; load.py builds it; optimiser.py has AdamW
    batch.py      from verified groups to the arrays of a step (zero-variance groups are dropped here), the
                  rows of each pass, and the statistics of the step
    score.py      log-probabilities of sampled tokens; probe.py compares them with the generator's
    sharding.py   FSDP2, tensor parallelism, and torch.compile of each layer
    group.py      the ranks as the driver sees them; launch.py starts them with torchrun
    checkpoint.py the learner and its model on disk

It may import `scalerl.rl.engine`, `scalerl.rl.checkpoint` and what is below. Imported by `cli`, `rl`,
`rl.loop`, `rl.placement.ray`.
"""
