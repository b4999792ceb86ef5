"""Kernels in C for models in float32 on a CPU, and the dense models that are written out for them.

    native.c, fused.py     decoding; kernels are compiled when a process first needs them (dense.py)
    blocks.py              the blocks of a KV cache, for any engine
    packed.c, packed.py    the training pass over packed tokens, and their layout

It imports no other room.

Imported by `rl.engine`, `rl.learner`.
"""
