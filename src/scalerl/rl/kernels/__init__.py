"""Kernels in C for models in float32 on a CPU, and the dense models that are written out for them.

    native.c, fused.py     decoding
    packed.c, packed.py    the training pass over packed tokens, and their layout
    library.py             compiles both when they are first needed, and keeps what it made

It may import `scalerl.rl.model`. Imported by `rl.engine`, `rl.learner`.
"""
