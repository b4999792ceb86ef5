"""The weights of the best evaluations: model folders that stay while checkpoints come and go.

    checkpoints/best-00040/      the weights that were evaluated at step 40, in Hugging Face format

`MOST` of them are kept, because least is known about the newest evaluation: if the pass rate declines, that
shows only some evaluations later, and by then the peak must still be on disk. In simulated runs that decline,
the best kept model was below the peak pass rate at the end by .006 to .019 with one model, .001 to .011 with
two, and 0 to .008 with three; the smooth curve over all evaluations would choose one 0 to .007 below it.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scalerl.record.reader import RunRecord
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import BackgroundWriter, remove, step_folders, write_whole
from scalerl.rl.model.causal_lm import dtype_of, load_model
from scalerl.rl.model.weights import load_weights
from scalerl.rl.types import Weights

BEST = "best-"
"""Start of their names."""
MOST = 3

Smooth = Callable[[RunRecord], Mapping[int, float]]
"""Smooths the evaluations of a run so far: returns a denoised pass rate of each, by step."""


class BestWeights(BackgroundWriter):
    """The weights of the evaluations with the highest smoothed pass rates; a thread writes them."""

    def __init__(self, model: str, precision: str, tokenizer: Any, smooth: Smooth) -> None:
        """Take all but the weights from `model`, the folder of the run's initial model."""
        super().__init__("these weights")
        self._model, self._precision, self._tokenizer, self._smooth = model, precision, tokenizer, smooth

    def consider(self, run: Path, step: int, weights: Weights) -> None:
        """Keep the weights of `step` if they are among the best, and drop those that no longer are.

        Args:
            run: the run folder, whose newest evaluation is that of `step`.
            step: the trainer step after which they were evaluated.
            weights: held weights (`scalerl.rl.sync.shared_weights.hold`), which must not change.
        """
        self.wait()
        rates, folder = self._smooth(RunRecord.read(run)), run / "checkpoints"
        there = dict(step_folders(folder, BEST))
        # A step that is not in the record ranks first: it was among the best, and is evaluated again.
        order = sorted({*there, step}, key=lambda of: (rates.get(of, math.inf), of), reverse=True)
        dropped = [there[of] for of in order[MOST:] if of in there]
        if step in there or step not in order[:MOST]:
            remove(dropped)
            return
        path = folder / f"{BEST}{step:05d}"
        self.start(partial(self._write, path, weights, dropped))

    def _write(self, path: Path, weights: Weights, dropped: list[Path]) -> None:
        write_whole(path, lambda aside: self._save(weights, aside))
        remove(dropped)  # only once the new ones are complete

    def _save(self, weights: Weights, folder: Path) -> Sums:
        """Write weights as a model in Hugging Face format; LoRA adapters are already merged."""
        model: Any = load_model(self._model, dtype_of(self._precision))
        load_weights(model, weights)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return {}


def drop_newer(folder: Path, step: int) -> None:
    """Remove the weights of evaluations after `step`, which a resumed run makes again."""
    remove(path for of, path in step_folders(folder, BEST) if of > step)
