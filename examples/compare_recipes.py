"""Compare two recipes by one run of each: is a ceiling higher, is it reached sooner, or is that the seed?"""

import numpy as np

import scalerl
from scalerl.curve import LOG_LOGISTIC, Curve

rng = np.random.default_rng(0)
gpu_hours = np.linspace(0, 10_000, 41)


def run(ceiling: float) -> scalerl.Fit:
    """Stands for one of your runs: read it with `scalerl.RunRecord.read(folder)` and fit that."""
    curve = Curve(LOG_LOGISTIC, A=ceiling, B=1.9, C_mid=2500, R_0=0.3)
    pass_rate = curve(gpu_hours) + rng.normal(0, 0.006, len(gpu_hours))
    return scalerl.fit(scalerl.Points.from_arrays(gpu_hours, pass_rate, axis="gpu_hours"))


comparison = scalerl.compare({"base": [run(0.60)], "new": [run(0.64)]}, budget=16_000)  # a list of seeds each
print(comparison)
