"""Forecast any trainer's run from two columns: compute and pass rate."""

import numpy as np

import scalerl

gpu_hours = np.array([0, 250, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000, 5500, 6000])
pass_rate = np.array(
    [0.401, 0.403, 0.412, 0.433, 0.463, 0.482, 0.503, 0.520, 0.539, 0.547, 0.555, 0.565, 0.566, 0.574]
)

fit = scalerl.fit(scalerl.Points.from_arrays(gpu_hours, pass_rate, axis="gpu_hours"))
print(fit)
print(fit.forecast(12_000))
print(f"P(pass rate at 12,000 GPU-hours >= .57) = {fit.probability(0.57, 12_000):.2f}")
