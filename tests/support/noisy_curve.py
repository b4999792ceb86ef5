"""Evaluations of a curve with independent noise."""

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Points

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)


def noisy_points(truth=TRUTH, top=8000.0, n=16, sd=0.004, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    compute_N = np.linspace(0, top, n)
    return Points.from_arrays(scale * compute_N, truth(compute_N) + rng.normal(0, sd, n))
