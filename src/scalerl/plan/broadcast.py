"""When new weights are at each generator, by how they are sent.

Shapes in names: R generators.
"""

from __future__ import annotations

import numpy as np

from scalerl.plan.rates import Weights


def arrivals(weights: Weights, n_generators: int, n_trainers: int = 1) -> tuple[np.ndarray, float]:
    """Seconds from the start of a broadcast until each generator has the weights (R), and those until the
    sender can begin the next one.

    With S seconds for the weights over one link and latency l, the i-th of them has them after: flat,
    i (S + l); tree, ceil(log2(i + 1)) (S + l), as who has them sends to another in every round; chain of p
    pieces, S + (i - 1) S / p + i l.
    """
    once, latency = weights.gib / weights.gib_per_second, weights.latency
    i_R = np.arange(1, n_generators + 1)
    if weights.way == "flat":
        at_R = i_R * (once + latency)
        return at_R, float(at_R[-1])
    if weights.way == "tree":
        at_R = np.ceil(np.log2(i_R + 1)) * (once + latency)
        return at_R, float(at_R[-1])
    at_R = once + (i_R - 1) * once / weights.pieces + i_R * latency
    return at_R, once
