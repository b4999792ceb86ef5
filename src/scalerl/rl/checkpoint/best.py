"""The weights of the best evaluations: model folders that stay while newer checkpoints come and go.

    checkpoints/best-00040/      the weights that the evaluation of step 40 is of, in Hugging Face format

`MOST` of them are kept, as the newest evaluation is the one of which least is known: where a run falls, that
shows some evaluations later, and by then the peak must still be there. In simulated runs that fall, one model
was .006 to .019 of pass rate below the peak at the end, two .001 to .011, three 0 to .008; the smooth curve
over all evaluations 0 to .007.
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
"""How their names begin."""
MOST = 3

Smooth = Callable[[RunRecord], Mapping[int, float]]
"""Smooths a run so far: returns the pass rate of every evaluation without its noise, by step."""


class BestWeights(BackgroundWriter):
    """Keeps the weights of the evaluations with the highest rates; a thread writes them."""

    def __init__(self, model: str, precision: str, tokenizer: Any, smooth: Smooth) -> None:
        """`model` is the folder that the run began from: its files are those of the weights but for these."""
        super().__init__("these weights")
        self._model, self._precision, self._tokenizer, self._smooth = model, precision, tokenizer, smooth

    def consider(self, run: Path, step: int, weights: Weights) -> None:
        """Keep the weights of `step` if they are among the best, and drop those that are no longer.

        Args:
            run: the run folder, whose newest evaluation is that of `step`.
            step: what they are the version of.
            weights: held (`scalerl.rl.sync.shared_weights.hold`), until they are written.
        """
        self.wait()
        rates, folder = self._smooth(RunRecord.read(run)), run / "checkpoints"
        there = dict(step_folders(folder, BEST))
        # One that is not on record yet was better than all before, and will be: a resume evaluates it again.
        order = sorted({*there, step}, key=lambda of: (rates.get(of, math.inf), of), reverse=True)
        dropped = [there[of] for of in order[MOST:] if of in there]
        if step in there or step not in order[:MOST]:
            remove(dropped)
            return
        path = folder / f"{BEST}{step:05d}"
        self.start(partial(self._write, path, weights, dropped))

    def _write(self, path: Path, weights: Weights, dropped: list[Path]) -> None:
        write_whole(path, lambda aside: self._save(weights, aside))
        remove(dropped)  # once the new ones are whole

    def _save(self, weights: Weights, folder: Path) -> Sums:
        """Write them as a model in Hugging Face format; of LoRA they have the adapters merged."""
        model: Any = load_model(self._model, dtype_of(self._precision))
        load_weights(model, weights)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return {}


def drop_newer(folder: Path, step: int) -> None:
    """Remove the weights of evaluations after `step`, which a resume makes again."""
    remove(path for of, path in step_folders(folder, BEST) if of > step)
