"""Optuna: a pruner that stops trials whose forecast says that they cannot become the best.

    study = optuna.create_study(direction="maximize", pruner=ForecastPruner(budget=400))

and in the objective, after every evaluation, `trial.report(pass_rate, step)`, and `optuna.TrialPruned` if
`trial.should_prune()`. `step` is the compute of the trial so far.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import TrialState

from scalerl.errors import InputError
from scalerl.integrations.rule import Rule, Sweep

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)


class ForecastPruner(BasePruner):
    """Prunes trials by `scalerl.integrations.rule`, and logs the reasons at level INFO.

    A step counts compute. As Optuna's steps are integers, report trainer steps if steps cost the same in all
    trials, else GPU-seconds or tokens. Step 0 is the evaluation before training. A pruned trial has ended, as
    Optuna cannot pause it.

    Args:
        budget: the step at which a whole trial ends.
        margin: as in `Rule`, and so are `level`, `noise_sd` and `early`.

    Raises:
        InputError: an argument is out of its range; by `prune` also if the study does not maximise or a
            value is not a pass rate in [0, 1]. NaN is skipped.
    """

    def __init__(
        self,
        budget: float,
        *,
        margin: float = 0.0,
        level: float = 0.95,
        noise_sd: float | None = None,
        early: bool = False,
    ) -> None:
        self.sweep = Sweep(Rule(budget, margin, level, noise_sd, early))

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether the trial is hopeless compared with running and complete trials."""
        if study.direction != StudyDirection.MAXIMIZE:
            raise InputError(
                "a pass rate is to be maximised: optuna.create_study(direction='maximize'), and with another "
                "metric another pruner"
            )
        rivals = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING))
        others = {rival.number: rival.intermediate_values for rival in rivals}
        why = self.sweep.hopeless(trial.number, trial.intermediate_values, others)
        if why:
            logger.info("trial %d is pruned: %s", trial.number, why)
        return why is not None
