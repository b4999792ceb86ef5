"""Ray Tune: a scheduler that pauses trials whose forecast says that they cannot become the best.

    scheduler = ForecastScheduler(metric="pass_rate", time_attr="gpu_hours", budget=400)
    tune.Tuner(train, tune_config=tune.TuneConfig(scheduler=scheduler, num_samples=20))

A trial that can continue later is paused, and frees its resources: one that has reported a checkpoint, or a
class with `save_checkpoint`. A function without a checkpoint is stopped, as it would start from scratch. A
paused trial is resumed when the best no longer beats it, as that failed or its forecast has fallen; pending
trials come first. When nothing else runs or waits, the rest are stopped, or with `resume_paused` resumed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC, SHOULD_CHECKPOINT
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.trainable import FunctionTrainable

from scalerl.errors import InputError
from scalerl.integrations.rule import Rule, Sweep

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

logger = logging.getLogger(__name__)


class ForecastScheduler(FIFOScheduler):
    """Pauses or stops trials by `scalerl.integrations.rule`, and logs the reasons at level INFO.

    Args:
        budget: compute at which a whole trial ends, in the unit of `time_attr`.
        metric: the reported key of the pass rate; defaults to that of `TuneConfig`.
        time_attr: the reported key of the trial's compute so far; defaults to iterations, which are
            comparable only if they cost the same in all trials.
        margin: as in `Rule`, and so are `level`, `noise_sd` and `early`.
        pause: False stops hopeless trials for good. Paused ones count against `max_concurrent_trials`.
        resume_paused: when no other trial runs or waits, resume the paused ones, the most promising first,
            and run them to their end.

    Raises:
        InputError: an argument is out of its range; during a study also if it minimises, or a value is not a
            pass rate in [0, 1]. NaN and None are skipped.
    """

    # Otherwise Tune would pass several results at once, and a decision could come too late to save compute.
    _supports_buffered_results = False

    def __init__(
        self,
        budget: float,
        *,
        metric: str | None = None,
        time_attr: str = "training_iteration",
        margin: float = 0.0,
        level: float = 0.95,
        noise_sd: float | None = None,
        early: bool = False,
        pause: bool = True,
        resume_paused: bool = False,
    ) -> None:
        super().__init__()
        self._metric = metric
        self._time_attr = time_attr
        self._pause = pause
        self._resume_paused = resume_paused
        self._sweep = Sweep(Rule(budget, margin, level, noise_sd, early))
        self._values: dict[str, dict[float, float]] = {}
        """Evaluations of trials that may become the best, and of paused trials."""
        self._paused: set[str] = set()
        self._spared: set[str] = set()
        """Hopeless trials that are run to their end all the same."""

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Take the metric of `TuneConfig`, whose mode must be "max"."""
        if mode not in (None, "max"):
            raise InputError(f"a pass rate is to be maximised: mode='max', found {mode!r}")
        accepted = super().set_search_properties(metric, mode, **spec)
        if self._metric == DEFAULT_METRIC:
            raise InputError(
                "ForecastScheduler: which metric is the pass rate? Say metric=... here or in TuneConfig"
            )
        return accepted

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        """Record an evaluation, and decide whether the trial continues."""
        # A loop may report None between evaluations.
        if self.metric is None or result.get(self.metric) is None:
            return TrialScheduler.CONTINUE
        name = trial.trial_id
        if self._time_attr not in result:
            raise InputError(
                f"trial {name} reports no {self._time_attr!r}, its compute, beside {self.metric!r}"
            )
        compute = float(result[self._time_attr])
        known = self._values.get(name, {})
        # After a restore, earlier reports from beyond the checkpoint are no longer part of the trial's curve.
        before = {c: value for c, value in known.items() if c < compute}
        self._values[name] = before | {compute: float(result[self.metric])}
        why = None if name in self._spared else self._why(trial)
        if why is None:
            return TrialScheduler.CONTINUE
        trainable = trial.get_trainable_cls()
        keeps_state = trial.has_checkpoint() or not (trainable and issubclass(trainable, FunctionTrainable))
        # A paused function without a checkpoint would start from scratch and spend its compute twice.
        resumable = self._pause and (result.get(SHOULD_CHECKPOINT) or keeps_state)
        logger.info("trial %s is %s: %s", name, "paused" if resumable else "stopped", why)
        if resumable:
            self._paused.add(name)
            return TrialScheduler.PAUSE
        # A stopped trial cannot become the best any more, so the others need not beat it.
        del self._values[name]
        return TrialScheduler.STOP

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """Drop a failed trial, as the others need not beat it."""
        self._values.pop(trial.trial_id, None)

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """Return the next pending trial, else a paused one; stop paused ones when nothing else is left."""
        trials = tune_controller.get_trials()
        paused = [trial for trial in trials if trial.status == Trial.PAUSED]
        for trial in trials:
            if trial.status == Trial.PENDING:
                return trial
        for trial in paused:
            if self._why(trial) is None:
                return self._resumed(trial)
        # A running trial may still fail or fall back, which may make a paused one the best again.
        if any(trial.status == Trial.RUNNING and trial.trial_id not in self._spared for trial in trials):
            return None
        if paused and self._resume_paused:
            trial = max(paused, key=lambda t: self._sweep.reach(t.trial_id, self._values[t.trial_id]).high)
            self._spared.add(trial.trial_id)
            return self._resumed(trial)
        for trial in paused:
            tune_controller.stop_trial(trial)
        return None

    def _resumed(self, trial: Trial) -> Trial:
        if trial.trial_id in self._paused:
            logger.info("trial %s is resumed", trial.trial_id)
            self._paused.remove(trial.trial_id)
        return trial

    def _why(self, trial: Trial) -> str | None:
        """Return why a trial is hopeless compared with those not paused, stopped or failed, or None."""
        others = {name: values for name, values in self._values.items() if name not in self._paused}
        return self._sweep.hopeless(trial.trial_id, self._values.get(trial.trial_id, {}), others)

    def debug_string(self) -> str:
        """Return one line for Tune's table."""
        return f"Forecasts at {self._sweep.rule.budget:g} {self._time_attr}: {len(self._paused)} paused."
