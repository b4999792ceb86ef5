"""Kernels in C for models in float32 on a CPU, and the dense models that are written out for them.

    native.c, fused.py     decoding; kernels are compiled when a process first needs them (dense.py)
    packed.c, packed.py    the training pass over packed tokens, and their layout

It may import `scalerl.rl.model`. Imported by `rl.engine`, `rl.learner`, `study`.
"""
