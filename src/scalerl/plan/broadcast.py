"""When new weights are at each generator, by how they are sent.

Shapes in names: R generators.
"""

from __future__ import annotations

import numpy as np

from scalerl.plan.rates import Weights


def arrivals(
    weights: Weights, of_recipe: str, n_generators: int, n_trainers: int = 1
) -> tuple[np.ndarray, float]:
    """Seconds from the start of a broadcast until each generator has the weights (R), and those until the
    sender can begin the next one.

    With S seconds for the weights over one link, latency l and p pieces, the i-th node of generators has them
    after: flat, i (S + l); tree, ceil(log2(i + 1)) (S + l), as who has them sends to another in every round;
    chain, S + (i - 1) S / p + i l; `spread` and `owners` see below.
    """
    way = of_recipe if weights.way == "recipe" else weights.way
    once, latency = weights.gib / weights.gib_per_second, weights.latency
    i_R = np.arange(n_generators) // weights.per_node + 1
    if way == "flat":
        at_R = i_R * (once + latency)
        return at_R, float(at_R[-1])
    if way == "tree":
        at_R = np.ceil(np.log2(i_R + 1)) * (once + latency)
        return at_R, float(at_R[-1])
    if way == "chain":
        return once + (i_R - 1) * once / weights.pieces + i_R * latency, once
    lasts = (_spread if way == "spread" else _owners)(weights, int(i_R[-1]), n_trainers)
    return np.full(n_generators, lasts), lasts


def _spread(weights: Weights, nodes: int, n_trainers: int) -> float:
    """Ray's object store, where every node begins with another piece, and every node that has a copy of a
    piece may be asked for it.

    At first each piece is where it was put, and nodes / p ask for it. Afterwards it is on all of these, and
    as many ask for it again: a copy is asked for once, on average.
    """
    first = _first_round(weights, nodes, n_trainers)
    once = weights.gib / weights.gib_per_second
    return first + (weights.pieces - 1) / weights.pieces * once + weights.pieces * weights.latency


def _owners(weights: Weights, nodes: int, n_trainers: int) -> float:
    """The same where each piece comes from where it was put and from nowhere else."""
    rounds = weights.pieces * _first_round(weights, nodes, n_trainers)
    return rounds + weights.pieces * weights.latency


def _first_round(weights: Weights, nodes: int, n_trainers: int) -> float:
    """Until all nodes have a piece each: as long as the busiest source sends."""
    piece, sources = weights.gib / weights.pieces, min(n_trainers, weights.pieces)
    most = max(piece * nodes / sources, weights.largest * nodes / weights.pieces, piece)
    return most / weights.gib_per_second
