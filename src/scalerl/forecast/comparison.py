"""The answer of a comparison: differences, claims, crossings, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from scalerl._views import views
from scalerl.curve.answers import span
from scalerl.curve.families import LABELS
from scalerl.curve.seeds import SeedPrior
from scalerl.errors import counted, listed
from scalerl.forecast.crossing import Crossing
from scalerl.frames import columns_of, data_frame
from scalerl.jsonl import plain
from scalerl.numbers import chance_text
from scalerl.quantiles import Interval
from scalerl.record.metric import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scalerl.curve.result import Fit

Verdict = Literal[
    "higher at the compute seen",
    "lower at the compute seen",
    "higher as measured",
    "lower as measured",
    "higher ceiling",
    "lower ceiling",
    "reaches it sooner",
    "reaches it later",
    "not significant",
    "inconclusive",
]


_ASKED = {
    "measured": "measured",
    "pass_rate_seen": "compute seen",
    "A": "ceiling",
    "compute_to_own": "efficiency",
}


@dataclass(frozen=True)
class Difference:
    """Recipe against base in one quantity: a difference in pass rate, or a ratio of computes or exponents.

    `interval` is for the recipes, with the seed variance; `runs_only` is for these runs, without it. Ratios
    may be 0 or infinite where only one side reaches a target.
    """

    kind: Literal["difference", "ratio"]
    base: float
    """Median of the base's own value."""
    recipe: float
    median: float
    interval: Interval
    runs_only: Interval

    def __str__(self) -> str:
        spec, lead = ("+.3f", "") if self.kind == "difference" else (".3g", "x")
        own = f"{lead}{self.median:{spec}} {span(self.interval, spec)}"
        return f"{own}   these runs {span(self.runs_only, spec)}"


@dataclass(frozen=True)
class Claim:
    """The answer to one question about a pair of recipes.

    Under the assumed spread of seeds, 1 - level is the family-wise error of the verdicts by curves. `p` is
    the two-sided tail mass at no difference, seed variance included; `p_adjusted` the same after Holm's
    correction over all questions of the comparison; `p_runs_only` the same without the seed variance, for
    these runs. `seeds` of each recipe detect the observed difference with power .8; None above 100. All are
    None where no saturating curve describes a run.
    """

    verdict: Verdict
    p: float | None
    p_adjusted: float | None
    p_runs_only: float | None
    seeds: int | None
    why: str
    """Why the answer is inconclusive; else empty."""

    @property
    def needed(self) -> str:
        """The seeds of each recipe that would detect the observed difference, in words."""
        return "more than 100 seeds" if self.seeds is None else counted(self.seeds, "seed")

    def __str__(self) -> str:
        text = self.verdict.upper()
        if self.p is not None:
            text += f"   p {self.p:.3g}, adjusted {self.p_adjusted:.3g}"
        if self.why:
            return f"{text}   {self.why}"
        if self.verdict != "not significant":
            return text
        return f"{text}   {self.needed} of each would detect the observed difference (power .8)"


@dataclass(frozen=True)
class Pair:
    """One recipe against the base: what was measured, and what is extrapolated.

    `families` are the weights of the family that both share, and `one_family` is the probability that they
    share one; where they do not, ceilings are compared with each side's own families. `seen` compares the
    pass rates at `compute_seen`, the largest compute that all runs of both sides have reached: what was
    measured. `differences` has A, B, C_mid, `compute_to_own` (to three quarters of a recipe's own gain),
    `pass_rate_seen` (at `compute_seen`) and, with a budget or a target, `pass_rate` at the budget and
    `compute_to_target`, infinite where the target is above the ceiling. Where no saturating curve describes a
    run, A is left out of them, and `crossing` is None. `common_seeds` is the number of seeds that both sides
    have, if they are compared within these alone; None if runs are not paired. `measured` compares the pass
    rates at `measured_at` without a curve, paired by seed; None with fewer than two seeds in common.
    """

    recipe: str
    base: str
    families: dict[str, float]
    one_family: float
    seen: Claim
    ceiling: Claim
    efficiency: Claim
    compute_seen: float
    differences: dict[str, Difference]
    crossing: Crossing | None
    common_seeds: int | None = None
    measured: Claim | None = None
    measured_at: float | None = None

    @property
    def claims(self) -> dict[str, Claim]:
        """The answers, by the quantity of `differences` that they are about."""
        first = {"measured": self.measured} if self.measured else {}
        return first | {"pass_rate_seen": self.seen, "A": self.ceiling, "compute_to_own": self.efficiency}


@dataclass(frozen=True)
class Comparison:
    """Recipes against a base. Made by `compare`."""

    base: str
    runs: dict[str, int]
    """The number of runs (seeds) of every recipe."""
    metrics: tuple[Metric, ...]
    """What was fitted: one metric, unless the user named another for some runs."""
    axis: str
    level: float
    budget: float | None
    target: float | None
    seed_prior: SeedPrior
    pairs: tuple[Pair, ...]
    fits: Mapping[str, Sequence[Fit]] = field(repr=False)
    """The fits of every recipe's runs, which were compared."""

    def plot(
        self,
        ax: Axes | None = None,
        *,
        log: bool = False,
        color: Mapping[str, str] | None = None,
        ceiling: bool = True,
        forecast: float | Sequence[float] | None = None,
        legend: bool = True,
    ) -> Axes:
        """Draw the recipes by colour, with forecasts at the budget if there is one; see `scalerl.plot`."""
        at = (() if self.budget is None else self.budget) if forecast is None else forecast
        options = {"color": color, "ceiling": ceiling, "forecast": at}
        return views().plot(self.fits, log=log, ax=ax, legend=legend, **options)

    def to_latex(self, at: float | None = None) -> str:
        """Return a small table for a paper: A, B, C_mid and the pass rate at `at`, by default the budget.

        See `scalerl.latex`. The differences with their verdicts are in `to_frame`.

        Raises:
            InputError: `at` is negative or not finite.
        """
        return views().latex(self.fits, self.budget if at is None else at)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `scalerl compare --json` prints; infinite ends and a withheld A are None."""
        found = plain(asdict(replace(self, fits={})))
        del found["fits"]
        found |= {"metrics": [metric.to_json() for metric in self.metrics]}
        for pair in found["pairs"]:
            pair["differences"] = {"measured": None, "A": None} | pair["differences"]
        return found

    def to_frame(self) -> Any:
        """Make a `pandas.DataFrame` of `to_dict`.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.to_dict())

    def to_dict(self) -> dict[str, list[Any]]:
        """Return columns by name, with one entry for every difference: `median`, `low`, `high`.

        `verdict` and `p_adjusted` are in the rows of their quantities: `measured`, `pass_rate_seen`, the
        ceiling `A`, and `compute_to_own`, the efficiency.
        """
        names = ("recipe", "base", "quantity", "kind", "base_value", "recipe_value", "median", "low", "high")
        rows = []
        for pair in self.pairs:
            for name, found in pair.differences.items():
                values = found.kind, found.base, found.recipe, found.median, *found.interval
                row = dict(zip(names, (pair.recipe, pair.base, name, *values), strict=True))
                if claim := pair.claims.get(name):
                    row |= {"verdict": claim.verdict, "p_adjusted": claim.p_adjusted}
                rows.append(row)
        return columns_of(rows, (*names, "verdict", "p_adjusted"))

    def _repr_html_(self) -> str:
        return views().comparison_html(self)

    @property
    def doubt(self) -> str:
        """Why the runs' held-out prompts must differ, in one sentence; empty where they may be the same."""
        counts = {fit.metric.n_prompts for fits in self.fits.values() for fit in fits} - {0}
        if len(counts) < 2:
            return ""
        shown = listed([f"{count:,}" for count in sorted(counts)], most=4)
        return f"runs differ in their held-out prompts ({shown}), so a difference may be one of the prompts"

    def priors(self, same_prompts: bool = False) -> str:
        """Return the assumptions behind the answer; `same_prompts`: the output has a row of that name."""
        prior = self.seed_prior
        paired = any(pair.common_seeds for pair in self.pairs)
        within = "Paired runs are compared within their seeds, and differ beyond what these have in common. "
        same = "All runs are assumed to be evaluated on the same prompts."
        if self.doubt:
            same = f"{self.doubt[0].upper()}{self.doubt[1:]}."
        similar = (
            " Intervals hold for these held-out prompts; 'same prompts' extends them to similar prompts."
        )
        return (
            f"Seeds of one recipe are assumed to differ with sd {prior.A:g} in A, {prior.log_b:g} in log B "
            f"and {prior.log_mid:g} in log C_mid, updated by replicates; 'these runs' leaves seed variance "
            f"out. {within if paired else ''}{same}{similar if same_prompts else ''} Both recipes are mostly "
            "assumed to share a family of curves, so their A, B and C_mid differ from those of each fit "
            "alone."
        )

    def counted(self, pair: Pair) -> str:
        """Return the number of runs of recipe and base behind a pair, in words."""
        runs = self.runs[pair.recipe], self.runs[pair.base]
        if pair.common_seeds is None:
            return "{} and {} seeds".format(*runs)
        alone = [count - pair.common_seeds for count in runs]
        left_out = " ({} and {} without a partner left out)".format(*alone) if any(alone) else ""
        return f"paired by {pair.common_seeds} common seeds{left_out}"

    def rows(self, pair: Pair) -> list[tuple[str, str]]:
        """Return one pair as a table: labels and texts."""
        named = {LABELS.get(name, name): weight for name, weight in pair.families.items()}
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in named.items() if weight >= 0.005)
        labels = {
            "A": "ceiling A",
            "B": "efficiency B",
            "C_mid": "C_mid",
            "compute_to_own": "compute to 3/4 of own gain",
            "measured": f"measured at {pair.measured_at or 0:g}",
            "pass_rate_seen": f"pass rate at {pair.compute_seen:g}",
            "pass_rate": f"pass rate at {self.budget or 0:g}",
            "compute_to_target": f"compute to {self.target or 0:g}",
        }
        rows = [
            ("metric", "; ".join(map(str, self.metrics))),
            (
                f"{pair.recipe} against {pair.base}",
                f"{self.counted(pair)}   {self.axis}   {weights}   one family {pair.one_family:.2f}",
            ),
        ]
        rows += [(_ASKED[name], str(claim)) for name, claim in pair.claims.items()]
        if "A" not in pair.differences:
            rows.append((labels["A"], "withheld"))
        for name, difference in pair.differences.items():
            spec = ".3f" if difference.kind == "difference" else ".4g"
            values = f"{difference.base:{spec}} -> {difference.recipe:{spec}}"
            rows.append((labels[name], f"{values}   {difference}"))
        return [*rows, ("crossing", _crossing_text(pair))]

    def __str__(self) -> str:
        tables = [self.rows(pair) for pair in self.pairs]
        width = max(len(label) for rows in tables for label, _ in rows)
        texts = ["\n".join(f"{label:<{width}}  {text}" for label, text in rows) for rows in tables]
        return "\n\n".join([*texts, self.priors()])


def _crossing_text(pair: Pair) -> str:
    crossing = pair.crossing
    if crossing is None:
        return "withheld"
    first, last = crossing.within
    text = f"probability {chance_text(crossing.probability)} between {first:.3g} and {last:.3g}"
    if crossing.interval is None:
        return f"{text}; {pair.recipe} ends ahead with probability {chance_text(crossing.ahead_last)}"
    return (
        f"{text}; if so at {crossing.compute:.3g} {span(crossing.interval, '.3g')}: "
        f"{crossing.before} ahead before, {crossing.after} after"
    )
