"""Stop the hopeless trials of an Optuna study by forecasts of their ends (`pip install optuna`)."""

import numpy as np
import optuna

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.integrations import ForecastPruner

STEPS = 400  # of a whole trial


def train(trial: optuna.Trial) -> float:
    """Stands for your training: the learning rate decides the ceiling, the batch size how soon it is near."""
    log_lr = trial.suggest_float("log_lr", -7, -4)
    batch = trial.suggest_categorical("batch", [256, 512, 1024])
    ceiling = 0.65 - 0.08 * (log_lr + 5.5) ** 2
    curve = Curve(LOG_LOGISTIC, ceiling, B=1.9, C_mid=batch / 16, R_0=0.30)
    rng = np.random.default_rng(trial.number)
    pass_rate = 0.0
    for step in range(0, STEPS + 1, 20):
        pass_rate = float(curve(step)) + rng.normal(0, 0.006)  # evaluate on held-out prompts
        trial.report(pass_rate, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return pass_rate


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.RandomSampler(seed=0),
    pruner=ForecastPruner(budget=STEPS),
)
study.optimize(train, n_trials=12)

used = sum(max(trial.intermediate_values) for trial in study.trials)
print(f"best {study.best_value:.3f} with {study.best_params}")
print(f"{used / (STEPS * len(study.trials)):.0%} of the compute of all whole trials")
