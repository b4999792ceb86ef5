"""The training loop and what it keeps count of.

    pipeline.py   the loop, with its diagram; admission.py enforces k
    pool.py       which prompt is drawn next
    parts.py      generator, learner, verifier and evaluation, wherever the recipe places them
    counters.py, evaluations.py, agenda.py, progress.py, resume.py

It may import every room of `scalerl.rl` but `tracking`. `scalerl.rl.train` imports it.
"""
