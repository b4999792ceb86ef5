"""The choices of the algorithm, each a frozen dataclass with its equation.

    loss.py       CISPO, GSPO, DAPO's and others; the KL penalty. As for all of these choices, `kind` can also
                  name a class of your own as file.py:Class (scalerl/own_code.py, docs/extend/loss.md)
    advantage.py, averaging.py     rewards to advantages; the weight of every token
    schedule.py   how far the trainer may be ahead: PipelineRL(k), PPO off-policy
                  (scalerl/rl/loop/admission.py enforces k)
    curriculum.py, length.py       which prompts are retired; when thinking ends
    checked.py    calls all of these and checks what they return

It imports no other room.

Imported by `plan`, `rl.config`, `rl.engine`, `rl.engine.vllm`, `rl.learner`, `rl.loop`, `study`.
"""
