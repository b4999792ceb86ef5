"""Checkpoints: everything that a resume needs, whole or absent.

    store.py      what is in one, and how it is written
    best.py       the weights of the best evaluations
    manifest.py   length and check sum of every file

It may import `scalerl.rl.model` and what is below. Imported by `rl`, `rl.learner`, `rl.loop`, `study`.
"""
