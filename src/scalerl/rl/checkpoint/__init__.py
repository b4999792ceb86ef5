"""Checkpoints: everything that a resume needs, complete or absent.

    store.py      the content of a checkpoint, and how it is written
    best.py       the weights of the best evaluations
    manifest.py   length and checksum of every file

It may import `scalerl.rl.model` and what is below. Imported by `rl`, `rl.learner`, `rl.loop`, `study`.
"""
