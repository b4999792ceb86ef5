"""The learner: forward, loss, one optimiser step.

    learner.py    in one process; fsdp/ sharded over ranks
    batch.py      from verified groups to the arrays of a step; zero-variance groups are dropped here
    score.py      log-probabilities of sampled tokens; probe.py compares them with the generator's

It may import `scalerl.rl.engine`, `scalerl.rl.checkpoint` and what is below.
"""
