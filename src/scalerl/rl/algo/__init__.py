"""The choices of the algorithm, each a frozen dataclass with its equation.

    loss.py       CISPO, GSPO, DAPO's and others; the KL penalty
    advantage.py, averaging.py     rewards to advantages; the weight of every token
    schedule.py   how far the trainer may be ahead: PipelineRL(k), PPO off-policy
    curriculum.py, length.py       which prompts are retired; when thinking ends

It imports no other room. `scalerl.rl.config` and everything above import it.
"""
