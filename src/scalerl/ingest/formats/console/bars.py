"""The steps of the Hugging Face Trainer, whose rows have none: that of the progress bar drawn after each."""

import re
from array import array

import numpy as np

from scalerl.ingest.formats.console.lines import ConsoleLine

_MOST_BARS = 16
"""Bars that are followed, by their totals: those of training, of an evaluation, and a few more."""
_LEAST_TOLD = 0.8
"""Share of the rows after which a bar has to be drawn, of a console that may be damaged."""
_MOST_ASTRAY = 0.02
"""Share of the rows of training whose step may not be above that before."""
_ROUNDED = 1.1e-3
"""How far the ratio of two epochs of four digits may be off."""
_ASTRAY = 0.02
"""Rows of training by which an evaluation may be elsewhere than where it stands."""


class _DrawnBar:
    """The first state of a bar after each row."""

    def __init__(self) -> None:
        self.row, self.state = array("q"), array("q")
        self.restarted = array("q")
        """Rows after which it stood at 0."""

    def draw(self, row: int, state: int) -> None:
        if not self.row or self.row[-1] != row:
            self.row.append(row)
            self.state.append(state)
        if not state and (not self.restarted or self.restarted[-1] != row):
            self.restarted.append(row)


class ProgressBars:
    """Follows rows and bars, and tells the steps of the rows.

    tqdm draws its bars again after every text that it prints, and the bar of the training is at the step that
    the text is of. Where the text went through a buffer that the bars did not, or no bars were printed, rows
    of training are counted instead, if their epochs grow as the counts do.
    """

    _bar = re.compile(r"\d{1,3}%\|[^|]{0,400}\|\s{0,9}(\d{1,15})/(\d{1,15})\s\[")

    def __init__(self) -> None:
        self._bars: dict[int, _DrawnBar] = {}
        self._is_evaluation, self._epoch = array("b"), array("d")

    def __len__(self) -> int:
        return len(self._is_evaluation)

    def look(self, line: ConsoleLine) -> None:
        """Take the state of a bar, if there is one in the line."""
        if not self._is_evaluation or "%|" not in line.text:
            return
        if found := self._bar.search(line.text):
            state, total = int(found[1]), int(found[2])
            if total in self._bars or len(self._bars) < _MOST_BARS:
                self._bars.setdefault(total, _DrawnBar()).draw(len(self._is_evaluation) - 1, state)

    def add(self, is_evaluation: bool, epoch: float) -> None:
        """Add a row."""
        self._is_evaluation.append(is_evaluation)
        self._epoch.append(epoch)

    def steps(self) -> np.ndarray | None:
        """Return the step of every row, (R,), as a bar says, NaN without; None where no bar tells most."""
        is_training_R = self._is_training()
        for _, bar in sorted(self._bars.items(), reverse=True):
            if len(bar.row) < _LEAST_TOLD * len(is_training_R):
                continue
            row_B = np.frombuffer(bar.row, dtype=np.int64)
            step_R = np.full(len(is_training_R), np.nan)
            step_R[row_B] = np.frombuffer(bar.state, dtype=np.int64)
            # A resumed run draws its bar at 0 first, and logs steps again.
            restarts_R = np.zeros(len(step_R) + 1, dtype=int)
            restarts_R[np.frombuffer(bar.restarted, dtype=np.int64) + 1] = 1
            restarts_R = np.cumsum(restarts_R)[:-1]
            is_told_R = is_training_R & ~np.isnan(step_R)
            is_astray_T = (np.diff(step_R[is_told_R]) <= 0) & (np.diff(restarts_R[is_told_R]) == 0)
            if np.sum(is_astray_T) <= _MOST_ASTRAY * len(is_astray_T):
                return step_R
        return None

    def counts(self) -> np.ndarray | None:
        """Return the rows of training up to every row, (R,); None where these are not in proportion to steps.

        Those are in proportion to epochs, which have four digits.
        """
        is_training_R = self._is_training()
        count_R = np.cumsum(is_training_R).astype(float)
        epoch_R = np.frombuffer(self._epoch)
        if not is_training_R.any():
            return count_R if len(count_R) == 1 else None
        last = int(np.flatnonzero(is_training_R)[-1])
        a_row = epoch_R[last] / count_R[last]
        off_R = np.abs(epoch_R - a_row * count_R)
        is_in_order = (off_R <= np.maximum(_ROUNDED * epoch_R, _ASTRAY * a_row)).all()
        return count_R if is_in_order else None

    def _is_training(self) -> np.ndarray:
        return np.frombuffer(self._is_evaluation, dtype=np.int8) == 0
