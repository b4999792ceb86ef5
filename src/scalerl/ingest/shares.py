"""Values of a metric as shares in [0, 1], and what its name and values show about rewards and prompts."""

import math
import re
from collections.abc import Collection
from fractions import Fraction

import numpy as np

from scalerl.ingest.logs.log import Log, finite
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.vocabularies import Vocabulary, is_like
from scalerl.record.metric import is_held_out_share, scaled_by

_SLACK = 1e-6
_WELL_BELOW = -0.05
"""The lowest mean of rewards of -1 and 1 is below this; one just below 0 may come from a penalty."""
_OF_PERCENT = re.compile(r"percent(?!ile)|pct|%", re.IGNORECASE)
_SMALLEST_SCALE, _LARGEST_SCALE = 0.75, 1.2
"""A spread that fits rewards of 0 and a number in this range is taken as that of 0 and 1; below the range it
may be that of small batches."""
_LEAST_SQUARE = 0.6
"""The mean square of rewards of -1 and 1 is 1; estimated from the spreads of small batches it is lower."""
_FEWEST_VALUES, _FEWEST_DECIMAL = 6, 12
_MOST_COMPLETIONS = 20_000
_LARGEST_DENOMINATOR = 5000
_ROUNDING = 1e-10
"""Largest difference between a mean in 64 bits and the fraction that it is."""


def shares_of(
    value_N: np.ndarray, name: str, log: Log, vocabulary: Vocabulary, asked: ReadOptions
) -> tuple[np.ndarray, str, str]:
    """Convert the values of a metric to shares in [0, 1]; return them, how in a sentence, and why not."""
    wrong, right, scaling = rewards_of(name, log, vocabulary, asked)
    how = ""
    if asked.rewards is None:
        is_share = any(is_like(name, pattern) for pattern in vocabulary.shares)
        rate_N, how, why_not = as_share(value_N / right, name, is_share)
    elif (
        (value_N.min() >= 0 and value_N.max() <= 1)
        # By its name it is a share of correct answers, whatever the rewards are.
        and (is_held_out_share(name) or vocabulary.matches("pass_rate", [name]))
    ):
        rate_N = np.empty(0)
        or_percent = " or --percent" * (right == 100 and not asked.in_python)
        why_not = (
            f"'{name}' is already a share in [0, 1], not a mean of rewards of {wrong:g} and "
            f"{right:g}: leave out {asked.naming(name='max_reward')}{or_percent}"
        )
    else:
        rate_N, why_not = (value_N - wrong) / (right - wrong), ""
        if rate_N.min() < -_SLACK or rate_N.max() > 1 + _SLACK:
            span = f"between {value_N.min():.3g} and {value_N.max():.3g}"
            why_not = f"'{name}' lies {span}, which no mean of rewards of {wrong:g} and {right:g} does"
            if value_N.min() < wrong:
                why_not += f"; {asked.naming(name='min_reward')} says what a wrong answer earns"
        rate_N = np.clip(rate_N, 0.0, 1.0)
    doubt = ""
    if not why_not:
        why_not, doubt = check_spread(log, name, value_N - wrong, right - wrong)
    rate_N = np.empty(0) if why_not else rate_N
    return rate_N, "; ".join(filter(None, [scaling, how, doubt])), why_not


def as_share(value_N: np.ndarray, name: str, is_share: bool = False) -> tuple[np.ndarray, str, str]:
    """Convert values to shares in [0, 1]; return them, how in a sentence, and why not.

    A name that says percent is believed, even if a run starts below 1, unless it is known to be a share.
    """
    low, high = float(value_N.min()), float(value_N.max())
    is_positive, is_low = low >= -_SLACK, high <= 1 + _SLACK
    # Before all else: percentages of a run below 1 % look like shares, and only the name shows it.
    if _OF_PERCENT.search(name) and not is_share and is_positive and high <= 100 + _SLACK:
        return np.clip(value_N / 100, 0.0, 1.0), f"'{name}' is named for percentages: divided by 100", ""
    if is_positive and is_low:
        return np.clip(value_N, 0.0, 1.0), "", ""
    if -1 - _SLACK <= low <= _WELL_BELOW and is_low:
        how = (
            f"'{name}' goes below 0: it is read as a mean of rewards of -1 and 1, and converted to "
            "a pass rate by (1 + reward) / 2"
        )
        return np.clip((value_N + 1) / 2, 0.0, 1.0), how, ""
    if _WELL_BELOW < low < 0 and is_low:
        why = (
            f"'{name}' goes down to {low:.3g}: not a share, and too close to 0 to tell rewards of -1 and 1 "
            "(as a pass rate: (1 + reward) / 2) from rewards with a penalty, such as for length"
        )
    elif is_positive:
        why = (
            f"'{name}' goes up to {high:.6g}, but a share at most to 1; percentages are divided by 100 with "
            "--percent (in Python, max_reward=100), and rewards by what a right answer earns"
        )
    else:
        span = f"'{name}' lies between {low:.3g} and {high:.3g}"
        why = f"{span}: neither a share nor a mean of rewards of -1 and 1"
    return np.empty(0), "", why


def rewards_of(name: str, log: Log, vocabulary: Vocabulary, asked: ReadOptions) -> tuple[float, float, str]:
    """Return what a wrong and a correct answer earn, by the user or the trainer's config, and a sentence.

    If neither says so, these are 0, 1 and an empty text.
    """
    if asked.rewards is not None:
        wrong, right = asked.rewards
        return wrong, right, scaled_by(name, wrong, right)
    for pattern, key, usual in vocabulary.scaled:
        if is_like(name, pattern):
            # A log that was exported without its config has the values but not their unit.
            said = finite(log.config.get(key))
            right = said if said > 0 else usual
            doubt = "" if said > 0 else ", its usual value, as the log does not say it"
            return 0.0, right, f"'{name}' is in units of {key}: divided by {right:g}{doubt}"
    return 0.0, 1.0, ""


def check_spread(log: Log, name: str, value_N: np.ndarray, unit: float) -> tuple[str, str]:
    """Return why the logged spread of rewards rules out a pass rate, and what it leaves in doubt; else "".

    If rewards are 0 or s, the mean is m = s p and the variance s^2 p (1 - p), so that s = m + variance / m.
    If rewards are -1 and 1, the variance is 1 - m^2. Trainers log the mean of the spreads of batches, which
    is lower: s is underestimated rather than too high.

    Args:
        log: the log, which has the spreads.
        name: the name of the mean reward.
        value_N: mean rewards, less what a wrong answer earns.
        unit: how much more a correct answer earns.
    """
    spread = log.metrics.get(re.sub(r"/mean$", "/std", name)) if name.endswith("/mean") else None
    if spread is None or len(spread) != len(value_N):
        return "", ""
    value_N = value_N / unit
    square_N = value_N**2 + (spread.value_N / unit) ** 2
    if value_N.min() < -_SLACK:
        if float(np.median(square_N)) >= _LEAST_SQUARE:
            return "", ""
        return f"'{name}' does not consist of rewards of -{unit:g} and {unit:g}: their spread is smaller", ""
    scale_N = square_N[value_N > 0] / value_N[value_N > 0]
    if not len(scale_N) or _SMALLEST_SCALE <= (scale := float(np.median(scale_N))) <= _LARGEST_SCALE:
        return "", ""
    found = f"by its spread a right answer earns about {scale * unit:.2g}"
    if scale < _SMALLEST_SCALE:
        return "", f"'{name}': {found} more than a wrong one, and not {unit:g}" if unit != 1 else ""
    return f"'{name}' does not consist of rewards of 0 and {unit:g}: {found}", ""


def completions_of(value_N: np.ndarray) -> int:
    """Return the number of completions behind shares, inferred from their fractions; 0 if not certain.

    Shares of n completions are multiples of 1 / n: the smallest n that fits every value is that number, or a
    divisor of it. Only distinct values with all their digits are fractions beyond chance.
    """
    distinct = {value for value in value_N.tolist() if 0 < value < 1}
    if len(distinct) < _FEWEST_VALUES:
        return 0
    total = 1
    for value in distinct:
        fraction = Fraction(value).limit_denominator(_LARGEST_DENOMINATOR)
        if abs(float(fraction) - value) > _ROUNDING:
            return 0
        total = math.lcm(total, fraction.denominator)
        if total > _MOST_COMPLETIONS:
            return 0
    # Values that were rounded to d digits are fractions, too, of 10^d. With a divisor of that, such as the
    # 500 of MATH-500, every one of those with d digits would have to be even, or a multiple of 5.
    digits = next((d for d in range(1, 5) if 10**d % total == 0), 0)
    if not digits:
        return 0 if _n_decimal(distinct, 4) > len(distinct) / 4 else total
    if total == 10**digits or len(distinct) - _n_decimal(distinct, digits - 1) < _FEWEST_DECIMAL:
        return 0
    return total


def _n_decimal(values: Collection[float], digits: int) -> int:
    """Return how many values have at most `digits` digits after the point."""
    scaled = [value * 10**digits for value in values]
    return sum(abs(one - round(one)) < _ROUNDING * 10**digits for one in scaled)


def n_samples(name: str) -> int:
    """Return the completions per prompt in a metric's name (mean@16, avg@8, mean_at_16); 0 without."""
    found = re.search(r"(?:mean|avg)(?:@|_at_)(\d+)", name)
    # Seven digits and more are no count of samples, and int() raises for thousands of digits.
    return int(found[1]) if found and len(found[1]) < 7 else 0
