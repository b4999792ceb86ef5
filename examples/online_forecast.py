"""Forecast the end of a run from inside its training loop, after every evaluation."""

import math
import random

import scalerl

BUDGET = 12_000  # GPU-hours

forecaster = scalerl.Forecaster(axis="gpu_hours")
evaluated = forecaster.callback(BUDGET)  # prints one line to standard error after every evaluation


def evaluate(gpu_hours: float) -> float:
    """Stands for your evaluation on held-out prompts: a pass rate in [0, 1]."""
    gain = 0.21 / (1 + (2500 / gpu_hours) ** 1.9) if gpu_hours else 0.0
    return 0.40 + gain + random.gauss(0, 0.003)


random.seed(0)
for gpu_hours in range(0, 8000, 400):  # stands for your training loop
    evaluated(gpu_hours, evaluate(gpu_hours))
    if len(forecaster) >= 10 and forecaster.fit.probability(0.58, BUDGET) < 0.05:
        break  # .58 is out of reach: spend the rest on another recipe

forecast = forecaster.forecast(BUDGET)
print(forecast)
assert math.isclose(forecast.median, 0.60, abs_tol=0.05)
