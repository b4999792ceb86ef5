"""The first sentence of a page: what a run will reach, or why that is not known yet."""

import math

import numpy as np

from scalerl.curve.answers import GO, NO_GO
from scalerl.curve.result import Fit
from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.numbers import Unit, chance_text, rate, rate_interval
from scalerl.view.facts.frozen import sentence
from scalerl.view.facts.notices import ceiling_text, is_made, misfit_in_words
from scalerl.view.facts.shown import RunGroup, ShownRun
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.groups import grouped

Named = list[tuple[str, str]]
MOST = 6
"""Number of runs and recipes with answers in sentences; the tables have all."""
_WORDS = {"go": "yes", "no-go": "no"}
"""The answer in a sentence, by the verdict."""


def sentence_of(view: RunsView) -> str:
    """Return the answer of a page in one sentence."""
    if len(view.runs) == 1:
        question = f"{_question(view)} " if view.target is not None and view.runs[0].fit else ""
        return question + run_answer(view, view.runs[0])
    if view.target is not None:
        return f"{_question(view)} {_verdicts(view, view.target)}"
    if view.comparison is not None:
        moved = "; ".join(map(_moved, view.comparison.pairs[:MOST]))
        return f"Compared with {view.comparison.base}: {moved}."
    if not all(one.is_comparable(view.metrics[0]) for one in view.metrics):
        return view.not_compared or "These runs are of different metrics, so none is said to be the highest."
    fitted = [run for run in view.runs if run.fit is not None and run.fit.misfit is None]
    if not fitted:
        return view.not_compared or f"{len(view.runs)} runs; none has a curve yet."
    recipes = [group for group in view.recipe_groups if any(run in fitted for run in group.runs)]
    best = max(
        recipes, key=lambda group: float(np.mean([fit.forecast(view.end).median for fit in group.fits]))
    )
    what = "recipes" if any(len(group.runs) > 1 for group in view.recipe_groups) else "runs"
    of = f"Of {len(view.recipe_groups)} {what} {best.name} "
    of += "is forecast highest" if len(recipes) > 1 else "alone has a curve"
    ahead = f"{of if len(view.recipe_groups) > 1 else best.name}: {_answer(view, best)}"
    return f"{ahead} {view.not_compared}".rstrip()


def _verdicts(view: RunsView, target: float) -> str:
    """Return the runs by their verdict: `Yes: a, b; no: c.`"""
    said = grouped((group.name, _word(view, group, target)) for group in view.recipe_groups)
    parts = []
    for word in sorted(said, key=lambda word: [*_WORDS.values(), word].index(word)):
        more = f" and {len(said[word]) - MOST} more" if len(said[word]) > MOST else ""
        parts.append(f"{word}: {', '.join(said[word][:MOST])}{more}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _word(view: RunsView, group: RunGroup, target: float) -> str:
    """Return the verdict on a recipe in a word: that of its run, or of its mean curve over seeds."""
    if group.draws is None:
        sound = first if (first := _only_fit(group)) and not first.misfit else None
        verdict = sound.chance(target, view.end).verdict if sound else "no curve"
        return _WORDS.get(verdict, verdict)
    if any(one.doubt(view.end) for one in group.fits):
        return "too early"
    chance = _recipe_chance(view, group, target)
    return "yes" if chance >= GO else "no" if chance <= NO_GO else "too early"


def _recipe_chance(view: RunsView, group: RunGroup, target: float) -> float:
    """Return the probability that the mean curve of a recipe over its seeds reaches the target at the end."""
    assert group.draws is not None
    return float(np.mean(group.draws.curves_at(np.array([view.end]))[:, 0] >= target))


def _answer(view: RunsView, group: RunGroup) -> str:
    """Return the forecast of a recipe over its seeds in one clause; for a single run, its own answer."""
    if group.draws is None:
        missing = "Not answered over its seeds, as not each has a curve: the table has them."
        longest = max(group.runs, key=lambda run: run.compute)
        return run_answer(view, longest) if len(group.runs) == 1 or _only_fit(group) else missing
    band = group.mean_curve(np.array([view.end]), view.level)
    low, high = band.lo_M.item(), band.hi_M.item()
    about = f"about {rate(band.median_M.item())} {rate_interval((low, high))}"
    chance = ""
    if view.target is not None:
        chance = f"; chance of {rate(view.target)}: {chance_text(_recipe_chance(view, group, view.target))}"
    return f"At {view.unit.show(view.end)} ({view.where}) {about} over {len(group.fits)} seeds{chance}."


def _only_fit(group: RunGroup) -> Fit | None:
    """Return the fit of a recipe with one run, or copies of one; None otherwise, or if a run has no fit."""
    fits = group.fits
    return fits[0] if len(fits) == 1 and all(run.fit for run in group.runs) else None


def _moved(pair: Pair) -> str:
    """Return the claims about a recipe in a few words, without numbers."""
    made = [claim.verdict for claim in pair.claims.values() if is_made(claim)]
    if made:
        return f"{pair.recipe} {' and '.join(made)}"
    is_open = any(claim.verdict == "inconclusive" for claim in pair.claims.values())
    return f"{pair.recipe} {'inconclusive' if is_open else 'not significantly different'}"


def answers_of(view: RunsView) -> list[tuple[str, Named, str]]:
    """Return the answers for each of several runs, and for the compared recipes."""
    found: list[tuple[str, Named, str]] = []
    if len(view.runs) > 1 and view.target is not None:
        groups = view.recipe_groups
        what = "runs" if len(groups) == len(view.runs) else "recipes"
        of_groups = [(group.name, _answer(view, group)) for group in groups[:MOST]]
        found.append(("", of_groups + and_more(len(groups), what), ""))
    if view.comparison is not None:
        heading = f"Compared with {view.comparison.base}" if view.target is not None else ""
        pairs = view.comparison.pairs
        of_pairs = [(pair.recipe, plain_pair(pair)) for pair in pairs[:MOST]]
        found.append((heading, of_pairs + and_more(len(pairs), "recipes"), ""))
    return found


def and_more(total: int, what: str) -> Named:
    """Return a last item that counts the rest after the first `MOST` of `total`; empty if there is none."""
    left = total - MOST
    return [("And more.", f"{left} further {what}: the tables have them.")] if left > 0 else []


def plain_pair(pair: Pair) -> str:
    """Return the result for a pair in one sentence without statistics, which the table has.

    `No difference shown yet (lower by 0.013 ± 0.041 at the compute seen); about 27 seeds of each would
    show it.`
    """
    claims = ((claim, pair.differences.get(name)) for name, claim in pair.claims.items())
    made = [_shown(claim, difference) for claim, difference in claims if is_made(claim)]
    if made:
        return f"A difference is shown: {'; '.join(made)}."
    # A measured difference is stronger evidence than one between curves.
    name, where = ("measured", "as measured") if pair.measured else ("pass_rate_seen", "at the compute seen")
    claim, difference = pair.claims[name], pair.differences.get(name)
    by = "" if difference is None else f" ({_by(difference)} {where})"
    if claim.verdict == "inconclusive":
        return f"Nothing can be said yet{by}: {claim.why}."
    about = "about " * (claim.seeds is not None)
    return f"No difference shown yet{by}; {about}{claim.needed} of each would show it."


def _shown(claim: Claim, difference: Difference | None) -> str:
    """Return a claim in words: `lower at the compute seen, by 0.096 ± 0.029`."""
    text = claim.verdict.replace("reaches it", "reaches three quarters of its own gain")
    is_rate = difference is not None and difference.kind == "difference"
    return f"{text}, by {_by(difference).partition(' by ')[2]}" if difference and is_rate else text


def _by(difference: Difference) -> str:
    low, high = difference.interval
    way = "higher" if difference.median > 0 else "lower"
    return f"{way} by {rate(abs(difference.median))} ± {rate((high - low) / 2)}"


def run_answer(view: RunsView, run: ShownRun) -> str:
    """Return whether a run reaches the target, or its forecast, or why that is not known."""
    fit = run.fit
    if fit is None:
        return f"No curve is fitted: {run.reason}."
    cut = view.max_compute < math.inf
    alone = len(view.runs) == 1 and view.budget is None and view.target is None
    if alone and not cut and (frozen := _frozen(run)):
        return frozen
    if fit.misfit is not None:
        why = misfit_in_words(fit.lack_of_fit)
        return f"No saturating curve describes it: {why}. Its ceiling is withheld."
    if view.target is not None:
        return _verdict(fit, view.target, view.end, view.unit)
    forecast = fit.forecast(view.end)
    about = f"about {rate(forecast.median)} {rate_interval(forecast.prediction)}"
    forecast_text = f"At {view.unit.show(view.end)} ({view.where}) {about}. "
    if fit.identified:
        return f"{forecast_text}Its ceiling is {ceiling_text(fit.to_json())}."
    more = more_text(fit, view.end, view.unit)
    needed = fit.compute_to_identify
    doubt = ", and is not expected to be by then" if needed is None or needed > view.end else ""
    return f"{forecast_text}Its ceiling is not known yet{doubt}. {more}".rstrip()


def more_text(fit: Fit, end: float, unit: Unit) -> str:
    """Return how much more compute would identify the ceiling, `About 20 more GPU-hours would identify it.`

    Empty if that is beyond the compute `end`, or not expected.
    """
    needed, spent = fit.compute_to_identify, float(fit.points.compute_N[-1])
    if needed is None or not spent < needed <= end:
        return ""
    amount, _, name = unit.show(needed - spent).partition(" ")
    return f"About {amount} more {name} would identify it."


def _question(view: RunsView) -> str:
    who = "it" if len(view.runs) == 1 else "they"
    return f"Will {who} reach {rate(view.target)} by {view.unit.show(view.end)}?"


def _frozen(run: ShownRun) -> str:
    """Return the sentence on the frozen forecast if its outcome is known; else empty."""
    if run.frozen is None:
        return ""
    outcome = run.outcome(run.frozen)
    return sentence(run.frozen, outcome) if outcome.measured else ""


def _verdict(fit: Fit, target: float, budget: float, unit: Unit) -> str:
    chance, forecast = fit.chance(target, budget), fit.forecast(budget)
    value = f"{rate(forecast.median)} {rate_interval(forecast.prediction)}"
    about, more = f"about {value}", more_text(fit, budget, unit)
    share = chance_text(chance.probability)
    early = f"Not certain yet. Forecast at {unit.show(budget)}: {value}; chance of {rate(target)}: {share}."
    return {
        "go": f"Yes ({share}): {about}.",
        "no-go": f"No ({share}): {about}.",
        "too close": f"Too close to call: {about}; chance of reaching it: {share}.",
        "too early": f"{early} {more}".rstrip(),
        "training reward": f"No verdict, as this is a training reward: {about}.",
    }[chance.verdict]
