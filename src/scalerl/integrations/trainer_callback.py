"""Forecasts inside the Hugging Face Trainer and trainers built on it, such as TRL's.

trainer = GRPOTrainer(..., callbacks=[ForecastCallback(target=0.6)])

The trainer's log is read like that of any other trainer (`scalerl.ingest`), so a forecast equals that of
`scalerl fit OUTPUT_DIR --x steps` from the trainer_state.json of the same moment.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    TrainerCallback,
    TrainerControl as Control,
    TrainerState as State,
    TrainingArguments as Args,
)
from transformers.trainer_callback import CallbackHandler

from scalerl.curve.answers import Chance, Forecast, check_target
from scalerl.curve.fit import check_options
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, InputError, ScalerlError, listed, number_of
from scalerl.forecast.online import Forecaster
from scalerl.ingest.flops import model_cost
from scalerl.ingest.formats import trainer_state
from scalerl.ingest.formats.lines import name_of
from scalerl.ingest.load import run_of, wanted
from scalerl.ingest.logs.log import LogBuilder
from scalerl.ingest.options import ReadOptions
from scalerl.jsonl import read_object
from scalerl.record.evaluation import AXES, in_dollars
from scalerl.record.folder import RECORDS
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter

VERDICTS = {"go": 1.0, "no-go": -1.0, "too close": 0.0, "too early": 0.0, "training reward": 0.0}
"""Values of `forecast/verdict`; among those that are 0, "too close" has `forecast/identified` 1."""
_FITS = 50
"""Without held-out evaluations every row is one, and a fit is made when the steps have grown by 1 / this."""


class ForecastCallback(TrainerCallback):
    """Forecasts the end of the run after every evaluation, logs and prints it, and stops hopeless runs.

    The pass rate is the held-out one chosen by the importer (docs/reference/ingest.md). If the trainer
    evaluates nothing, it is the training reward that `metric` names, for which there is no verdict. Logged
    through the trainer's trackers, and in `state.log_history`:
    `forecast/median`, `forecast/low`, `forecast/high` (one more evaluation, at the end), `forecast/ceiling`,
    `forecast/ceiling_low`, `forecast/ceiling_high`, `forecast/identified` (0 or 1), and with a target
    `forecast/probability` and `forecast/verdict` (`VERDICTS`). Nothing is logged as long as there is no fit.

    Only the main process computes. Trainers do not pass the decision to stop to other processes, so this
    callback does after every step, by torch.distributed; without that, it can stop only a single process.
    Errors here never end a training: they are printed once, on standard error.
    """

    forecaster: Forecaster | None = None
    """The evaluations at the last forecast, for further questions; None before the first, and outside of the
    main process."""

    def __init__(
        self,
        *,
        target: float | None = None,
        end: float | None = None,
        axis: str = "steps",
        metric: str | None = None,
        max_reward: float | None = None,
        min_reward: float | None = None,
        stop_at: Literal["no-go"] | None = None,
        run_folder: str | Path | None = None,
        devices: float | None = None,
        model: str | Path | None = None,
        price: float | None = None,
        r0: float | Literal["free"] | None = None,
        min_compute: float = 0.0,
        level: float = 0.95,
    ) -> None:
        """Configure the forecasts; every argument may be left out.

        Args:
            target: pass rate whose probability at the end is wanted.
            end: compute at the end, in the unit of the axis; defaults to the last step of the training, which
                is known only on the axis `steps`.
            axis: compute axis, one of `scalerl.record.evaluation.AXES`.
            metric: the metric that is the pass rate, as in `state.log_history`; defaults to the choice of the
                importer (docs/reference/ingest.md).
            max_reward: reward of a right answer if not 1; the metric is rescaled by it.
            min_reward: reward of a wrong answer if not 0.
            stop_at: "no-go" ends the training at that verdict; a checkpoint is saved, unless the trainer
                saves none at all. "too early" and "too close" never end it, and no verdict does if another
                metric may have been meant (`Metric.is_ambiguous`): name it with `metric`.
            run_folder: a run folder to keep beside the trainer's output; a resumed run continues its folder.
            devices: number of devices, for `gpu_hours`, including those of separate generators; defaults to
                the trainer's.
            model: folder or config.json of the model, for `flops`.
            price: dollars per GPU-hour, for `dollars`.
            r0: as for `fit`, and so are min_compute and level.

        Raises:
            InputError: an argument is not valid, or one that it requires is missing.
        """
        check_target(0.0 if target is None else target, 0.0)
        if axis not in AXES:
            raise InputError(f"unknown compute axis {axis!r}: choose one of {', '.join(AXES)}")
        if end is None and axis != "steps":
            raise InputError(f"on the axis '{axis}' the end of a training is not known: give it, end=...")
        if end is not None and not 0 < number_of(end, "the end") < math.inf:
            raise InputError(f"the end must be a number above 0, found {end:g}")
        if stop_at not in (None, "no-go"):
            raise InputError(f"stop_at is 'no-go' or None, found {stop_at!r}")
        if stop_at is not None and target is None:
            raise InputError("stop_at='no-go' needs a target: target=...")
        check_options(r0, min_compute, level=level)
        if axis == "dollars":
            in_dollars(np.empty(0), price)
        if axis == "flops" and model is None:
            raise InputError("the axis 'flops' needs the model's folder or config.json: model=...")
        self._target, self._end, self._axis, self._price = target, end, axis, price
        cost = None if model is None else model_cost(model)
        self._asked = ReadOptions(
            metric, devices=devices, model=cost, max_reward=max_reward, min_reward=min_reward, in_python=True
        )
        self._options: dict[str, Any] = {"r0": r0, "min_compute": min_compute, "level": level}
        self._stops = stop_at is not None
        self._folder = None if run_folder is None else Path(run_folder)
        self._warned: set[str] = set()
        self._writer: RunWriter | None = None
        self._start(resumed=False)

    def _start(self, resumed: bool) -> None:
        self._resumed, self._hopeless, self._next = resumed, False, 0
        self._seen: tuple[Any, ...] = ()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Start from scratch, or resume if the state has steps, as it then comes from a checkpoint."""
        self._start(resumed=state.global_step > 0)

    def on_evaluate(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Forecast; the trainer has already logged the evaluation."""
        self._look(args, state, control)

    def on_log(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Forecast from the training reward in a run that evaluates nothing."""
        # Every row is then an evaluation, and a fit for each would take most of a short step.
        if args.eval_strategy == "no" and state.global_step >= self._next:
            self._look(args, state, control)

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Stop all processes if the main one has found the run hopeless; every process calls this."""
        # All must stop at the same step, or the others would wait in a collective.
        if self._stops and args.world_size > 1:
            self._hopeless = _broadcast(self._hopeless, args.device)
            if self._hopeless:
                self._stop(args, control)

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Unlock the run folder."""
        self._close()

    def _look(self, args: Args, state: State, control: Control) -> None:
        self._next = state.global_step + max(state.global_step // _FITS, 1)
        if not state.is_world_process_zero:
            return
        with self._spared():
            self._evaluated(args, state, control)
        if self._hopeless and args.world_size == 1:
            self._stop(args, control)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Turn errors in the block into warnings, as no forecast may end a training."""
        try:
            yield
        except ScalerlError as error:
            self._warn([str(error)])
        except Exception as error:
            self._warn([f"no forecast: {type(error).__name__}: {error}"])

    def _evaluated(self, args: Args, state: State, control: Control) -> None:
        """Forecast if there is a new evaluation since the last time."""
        folder = Path(str(args.output_dir))
        # n_gpu is 0 on a CPU, and above 1 under DataParallel, which uses one process for all GPUs.
        devices = self._asked.devices or args.world_size * max(args.n_gpu, 1)
        asked = replace(self._asked, devices=devices)
        builder = LogBuilder(str(folder), trainer_state.FORMAT.name, name_of(folder), wanted(asked))
        trainer_state.fill(builder, vars(state), folder)
        record = run_of(builder.build(), asked)
        points = record.evals
        seen = len(points), points[-1].step, points[-1].pass_rate
        end = float(state.max_steps) if self._end is None else self._end
        if seen == self._seen or end <= 0:
            return
        if not self._seen:
            _print(state.global_step, f"metric: {record.metric}")
        self._seen = seen
        with self._spared():
            self._keep(record, end)
        self._forecast(record, end, args, state, control)

    def _forecast(self, record: RunRecord, end: float, args: Args, state: State, control: Control) -> None:
        points = Points.from_record(record, self._axis, self._price)
        self.forecaster = forecaster = Forecaster(points=points, **self._options)
        line = forecaster.line(end)
        try:
            fit = forecaster.fit
        except CannotAnswerError:
            self._warn(points.warnings)
            return _print(state.global_step, line)
        self._warn(fit.warnings)
        chance = None if self._target is None else fit.chance(self._target, end)
        if chance is not None:
            line += f"; {self._target:g}: {chance.answer}"
        _print(state.global_step, line)
        self._hopeless = False
        if self._stops and chance is not None and chance.verdict == "no-go":
            if fit.metric.is_ambiguous:
                others = f", and there are {listed(fit.metric.others)}" if fit.metric.others else ""
                what = f"no-go, but training is not stopped on {fit.metric}{others}"
                self._warn([f"{what}: name it with metric=..."])
            else:
                self._hopeless = True
                _print(state.global_step, f"training is stopped: {chance.why}")
        _log(_row(fit, fit.forecast(end), chance), args, state, control)

    def _stop(self, args: Args, control: Control) -> None:
        control.should_training_stop = True
        control.should_save = control.should_save or args.save_strategy != "no"

    def _keep(self, record: RunRecord, end: float) -> None:
        """Write the present state of the run to the run folder."""
        if self._folder is None:
            return
        if self._writer is None:
            # config.json is written once, so leave out everything that changes with every evaluation.
            config = {name: record.config[name] for name in ("name", "source", "metric")}
            config["budget"] = {"kind": self._axis, "amount": end}
            file = self._folder / "config.json"
            if self._resumed and file.is_file() and read_object(file).get("source") == config["source"]:
                files = [self._folder / name for name in RECORDS if (self._folder / name).exists()]
                self._writer = RunWriter.resume(self._folder, {one.name: one.stat().st_size for one in files})
            else:
                self._writer = RunWriter(self._folder, config)
            self._resumed = True  # so that an evaluation after the training continues the folder
        self._writer.whole(record)

    def _warn(self, texts: Iterable[str]) -> None:
        """Print each warning once, ignoring its numbers, as lists of left-out steps grow."""
        for text in texts:
            clause = text.split("; ")[0]
            kind = re.sub(r"\d[\d.]*(?:, \d[\d.]*)*(?: and \d+ more)?", "#", clause)
            if kind not in self._warned:
                self._warned.add(kind)
                tqdm.write(f"warning: {text}", file=sys.stderr)


def _row(fit: Fit, forecast: Forecast, chance: Chance | None) -> dict[str, float]:
    """Return the row for trackers, of numbers only, as some trackers drop everything else."""
    values = {"median": forecast.median, "low": forecast.prediction[0], "high": forecast.prediction[1]}
    values["identified"] = fit.identified
    if fit.ceiling is not None:
        low, high = fit.intervals.A
        values |= {"ceiling": fit.ceiling, "ceiling_low": low, "ceiling_high": high}
    if chance is not None:
        values |= {"probability": chance.probability, "verdict": VERDICTS[chance.verdict]}
    return {f"forecast/{name}": float(value) for name, value in values.items()}


def _log(row: dict[str, float], args: Args, state: State, control: Control) -> None:
    """Log a separate row, in the form of `Trainer.log`."""
    if state.epoch is not None:
        row["epoch"] = state.epoch
    state.log_history.append({**row, "step": state.global_step})
    # Trackers are called before this callback, so it is too late to add to their row. `control.should_log` is
    # reset at the next step, and a row kept for the next `on_log` would come an interval late, or never after
    # the last evaluation. Callbacks get neither the trainer nor the callback handler, but the handler is a
    # caller of this function, so look for it on the stack. TRL's own `log` would print its completions again.
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    if frame is not None:
        frame.f_locals["self"].on_log(args, state, control, row)


def _print(step: int, text: str) -> None:
    """Print a line on standard error without breaking progress bars."""
    tqdm.write(f"scalerl, step {step}: {text}", file=sys.stderr)


def _broadcast(flag: bool, device: torch.device) -> bool:
    """Return the flag of the main process; false if it cannot be sent to the others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    flags = torch.tensor([int(flag)], device=device)
    torch.distributed.broadcast(flags, src=0)
    return bool(flags.item())
