"""The crossing of two curves: which is ahead early, which late, and at what compute the lead changes.

Shapes: n draws, M computes.
"""

from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.posterior import Draws
from scalerl.quantiles import tails

LEAD = 0.005
"""Difference in pass rate below which neither curve leads: equal starts would cross by noise."""
_GRID = 64


@dataclass(frozen=True)
class Crossing:
    """The change of the lead between two recipes, over computes `within`.

    `probability` is that of a change. Given a change, `compute` and `interval` are the median and the central
    interval of the compute of the last one, and `before` and `after` the recipes ahead; all are None where
    fewer than one draw in a hundred crosses. `ahead_first` and `ahead_last` are the probabilities that the
    recipe (not the base) has the first and the last lead.
    """

    within: tuple[float, float]
    probability: float
    ahead_first: float
    ahead_last: float
    compute: float | None = None
    interval: tuple[float, float] | None = None
    before: str | None = None
    after: str | None = None


def find_crossing(
    base: Draws, recipe: Draws, names: tuple[str, str], within: tuple[float, float], level: float
) -> Crossing:
    """Find the crossing of two recipes' curves from paired draws; `names` are (base, recipe)."""
    compute_M = np.geomspace(*within, _GRID)
    lead_nM = recipe.curves_at(compute_M) - base.curves_at(compute_M)
    first_n, last_n = _end_leads(lead_nM)
    crosses_n = first_n * last_n < 0
    probability = float(crosses_n.mean())
    found = Crossing(within, probability, float(np.mean(first_n > 0)), float(np.mean(last_n > 0)))
    if probability < 0.01:
        return found
    log_c_n = _last_change(lead_nM[crosses_n], last_n[crosses_n], np.log(compute_M))
    low, middle, high = np.exp(np.quantile(log_c_n, np.insert(tails(level), 1, 0.5))).tolist()
    # Some of the draws that cross do so the other way round: the likelier direction is named.
    recipe_wins = bool(np.mean(last_n[crosses_n] > 0) >= 0.5)
    before, after = names[not recipe_wins], names[recipe_wins]
    return replace(found, compute=middle, interval=(low, high), before=before, after=after)


def _end_leads(lead_nM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the signs of the first and of the last lead above `LEAD`, 0 where there is none."""
    sign_nM = np.where(np.abs(lead_nM) > LEAD, np.sign(lead_nM), 0.0)
    rows, counts_nM = np.arange(len(sign_nM)), sign_nM != 0
    # Where no lead counts, argmax is 0, and the sign there is 0 as well.
    last = sign_nM.shape[1] - 1 - counts_nM[:, ::-1].argmax(axis=1)
    return sign_nM[rows, counts_nM.argmax(axis=1)], sign_nM[rows, last]


def _last_change(lead_nM: np.ndarray, last_n: np.ndarray, log_c_M: np.ndarray) -> np.ndarray:
    """Return log C of the last change of sign to `last_n`, linear between the computes."""
    other_nM = lead_nM * last_n[:, None] <= 0
    # After the last lead that counts the sign may waver: the change lies before that lead.
    settled_nM = np.cumsum((np.abs(lead_nM) > LEAD)[:, ::-1], axis=1)[:, ::-1] > 0
    i_n = lead_nM.shape[1] - 1 - (other_nM & settled_nM)[:, ::-1].argmax(axis=1)
    rows = np.arange(len(lead_nM))
    before_n, after_n = lead_nM[rows, i_n], lead_nM[rows, i_n + 1]
    part_n = before_n / (before_n - after_n)
    return log_c_M[i_n] + part_n * (log_c_M[i_n + 1] - log_c_M[i_n])
