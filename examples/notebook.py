"""A session in cells: a log of pass rates, its fit, a plot, and a second run beside it."""

# %% A log: here it is simulated; scalerl.load_run("runs/mine") or scalerl.load_run("verl.jsonl") reads one.
import matplotlib.pyplot as plt
import numpy as np

import scalerl
from scalerl.curve import LOG_LOGISTIC, Curve

rng = np.random.default_rng(0)
gpu_hours = np.linspace(0, 8000, 21)


def simulated(ceiling: float) -> scalerl.Points:
    """A run towards this ceiling, evaluated with a noise of .006."""
    noise = rng.normal(0, 0.006, gpu_hours.size)
    pass_rate = Curve(LOG_LOGISTIC, ceiling, 1.9, 2500.0, 0.3)(gpu_hours) + noise
    return scalerl.Points.from_arrays(gpu_hours, pass_rate, noise_sd=0.006, axis="gpu_hours")


# %% The fit: a notebook shows its plot and a table.
fit = scalerl.fit(simulated(0.61))
fit  # noqa: B018  # pyright: ignore[reportUnusedExpression]

# %% What will it reach, and is it worth going on?
print(fit.forecast(16_000))
print(fit.verdict(0.58, 16_000), fit.reasons(0.58, 16_000))

# %% Two runs on one pair of axes.
other = scalerl.fit(simulated(0.52))
ax = scalerl.plot({"new": fit, "base": other}, forecast=16_000)
plt.savefig("two_runs.png")

# %% Which is better, and what is seed?
comparison = scalerl.compare({"new": [fit], "base": [other]}, base="base")
print(comparison)
print(comparison.to_latex(at=16_000))
