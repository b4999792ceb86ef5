"""Runs that grow, for the tests of what follows them: evaluations along a known curve, seeded."""

import time
from dataclasses import asdict

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.record.evaluation import DeviceSeconds, EvalPoint, Flops, Tokens
from scalerl.record.writer import RunWriter

EVERY = 20
TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 250.0, 0.3)
BUDGET = {"kind": "steps", "amount": 1200}


class Growing:
    """A run folder that gets one evaluation, and the line of a step, after another."""

    def __init__(self, path, n=0, seed=0, **config):
        recipe = {"name": "r", "seed": seed, "health": {}}
        base = {"name": path.name, "seed": seed, "budget": BUDGET, "recipe": recipe}
        self.writer = RunWriter(path, {**base, **config})
        self.path, self.n = path, 0
        self._rng = np.random.default_rng(seed)
        self._start = time.time() - 3600
        for _ in range(n):
            self.grow()

    def grow(self):
        step = EVERY * self.n
        rate = float(np.clip(TRUTH(float(step)) + self._rng.normal(0, 0.006), 0, 1))
        at = self._start + 60 * self.n
        point = EvalPoint(
            step=step,
            pass_rate=rate,
            time=at,
            device_seconds=DeviceSeconds(0.5 * step, 0.4 * step, 0.1 * step, 0.0),
            flops=Flops(1e12 * step, 3e12 * step),
            tokens=Tokens(5000.0 * step, 4800.0 * step),
            n_prompts=300,
            n_samples=16,
            mean_p_1mp=0.15,
            truncated=0.02,
            entropy=0.5,
        )
        self.writer.evaluation(point, "held-out", ["a", "b"], np.array([1, 2]))
        spent = {name: asdict(getattr(point, name)) for name in ("device_seconds", "flops", "tokens")}
        self.writer.step({"step": step + 5, "time": at + 15, "truncated": 0.031, "entropy": 0.45, **spent})
        self.n += 1
        return rate

    def alarm(self, step, over=False):
        row = {"step": step, "metric": "truncated", "level": "alarm", "value": 0.14, "threshold": 0.1}
        self.writer.alarm({**row, "since": 100, "over": over, "worst": 0.14, "time": 0.0, "text": ""})

    def end(self):
        (self.path / "checkpoints" / "final").mkdir(parents=True)
        self.writer.close()
