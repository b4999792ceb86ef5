"""C kernels for models in float32 on a CPU, and the families of dense models that they support.

    native.c, fused.py     decoding
    packed.c, packed.py    the training pass over packed tokens, and their layout
    dense.py               the weights and shape of a dense model
    library.py             compiles both C files at first use, and caches the result

It may import `scalerl.rl.model`. Imported by `rl.engine`, `rl.learner`.
"""
