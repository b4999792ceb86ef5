"""A prior from sibling runs: what runs of the same base model and evaluation set show about B and A.

    p(log B, A) = .8 t(log B) N(A) + .2 prior of the fit              for each family; k siblings
    t: k - 1 degrees about the siblings' mean, scale^2 = s^2 (1 + 1/k)     N: mean and twice the sd of their A

The t is the predictive distribution of the next sibling's log B if theirs are normal with unknown mean and
variance (Gelman et al., Bayesian Data Analysis, 3rd ed., section 3.2). The siblings' own errors are not taken
out of their variance s^2, which is also at least their mean squared error and `LOG_B_FLOOR`^2: siblings that
hardly determine their B, or that agree by luck, give a wide prior. The prior of A is wide too, as a run may
differ more from its siblings than they do from one another. The share of the fit's own prior lets the data
overrule siblings of another kind (a robust meta-analytic prior: Schmidli et al., Biometrics 70, 2014). C_mid
and R_0 keep their prior, as C_mid moves with the batch and the learning rate. The prior is learnt family by
family, as B means something else in each; the families stay as probable as they were before the run.

Shapes: k siblings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import LABELS
from scalerl.curve.points import Points
from scalerl.curve.posterior import Posterior
from scalerl.curve.result import Fit
from scalerl.errors import InputError
from scalerl.record.reader import RunRecord

MIN_SIBLINGS = 3
"""Fewer do not determine their spread; with few the t has long tails."""
LOG_B_FLOOR = 0.08
"""Least spread of log B between siblings: that of the paper's nine leave-one-out arms."""
A_FLOOR = 0.05
"""Least standard deviation of the prior of A."""
A_WIDER = 2.0
"""How many times wider the prior of A is than the spread of the siblings."""
STRANGER = 0.2
"""Prior probability that a run is unlike its siblings."""


@dataclass(frozen=True)
class FamilyPrior:
    """The prior of (log B, A) given one family: a t of `scale` at `log_b`, and a normal at `A`."""

    family: str
    log_b: float
    scale: float
    A: float
    A_sd: float

    def log_ratio(self, log_b: np.ndarray, A: np.ndarray, degrees: int, log_base: np.ndarray) -> np.ndarray:
        """Return the log-density over that of the fit's own prior, `log_base`, at nodes of one shape."""

        def below(z: float) -> float:
            return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))

        t = (log_b - self.log_b) / self.scale
        log_t = -(degrees + 1) / 2 * np.log1p(t**2 / degrees) - 0.5 * math.log(degrees * math.pi)
        log_t += math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(self.scale)
        z = (A - self.A) / self.A_sd
        # The normal is truncated to [0, 1], where a ceiling lies: near 1 half of it would be outside.
        inside = below((1.0 - self.A) / self.A_sd) - below(-self.A / self.A_sd)
        log_normal = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - math.log(self.A_sd * inside)
        return np.logaddexp(math.log(1 - STRANGER) + log_t + log_normal - log_base, math.log(STRANGER))


@dataclass(frozen=True)
class CampaignPrior:
    """The prior of B and A from `n_siblings` other runs, for each family. Made by `learn`."""

    n_siblings: int
    families: tuple[FamilyPrior, ...]
    dropped: tuple[str, ...] = ()
    """Sources of siblings left out: the run itself, duplicates, and runs that no family describes."""

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the t."""
        return self.n_siblings - 1

    def apply(self, post: Posterior) -> Posterior:
        """Return the posterior under this prior mixed with its own: the same nodes with other weights.

        The posterior of the noise sd is unchanged. Nodes lie where the posterior had mass, so the siblings
        choose among what the run's own data allow.
        """
        by_name = {prior.family: prior for prior in self.families}
        log_weight = post.log_weight.copy()
        for index, family in enumerate(post.families):
            mine = post.family_cells == index
            log_b, A = post.log_b_cells[mine][:, None, None], post.A[mine]
            log_base = post.prior.log_base(family, log_b, A, post.R_0[mine])
            log_weight[mine] += by_name[family.name].log_ratio(log_b, A, self.degrees, log_base)
        return post.reweighted(log_weight)

    def __str__(self) -> str:
        own = self.families[0]
        without = f", without {', '.join(self.dropped)}" if self.dropped else ""
        return (
            f"campaign ({self.n_siblings} siblings): {LABELS[own.family]} B {math.exp(own.log_b):.3g} x/ "
            f"{math.exp(own.scale):.3g} (t, {self.degrees} degrees), A {own.A:.3f} +- {own.A_sd:.3f}{without}"
        )


def learn(siblings: Sequence[Fit], own: Fit) -> tuple[CampaignPrior | None, str]:
    """Learn the prior of a run from its siblings; return it, or None, and a sentence: what it is, or why.

    The siblings must be fitted with the `r0` and `min_compute` of the run, so that B and A are the same
    quantities in all of them. The run itself, whole or cut short, is left out; a sibling given twice counts
    once, and one that no family describes (`Fit.misfit`) does not count.

    Raises:
        InputError: a sibling has another compute axis (where B is another), metric, or set of families.
    """
    for sibling in siblings:
        # `_family_prior` finds families by their place, which must mean the same in all.
        if sibling.posterior.families != own.posterior.families:
            raise InputError(f"{sibling.points.source}: fit the run and its siblings with the same families")
        if not sibling.metric.is_comparable(own.metric):
            raise InputError(
                f"{sibling.points.source}: a sibling's metric is {sibling.metric}; the run's is {own.metric}"
                "; name one for each (--y NAME,NAME)"
            )
        if sibling.axis != own.axis:
            raise InputError(
                f"{sibling.points.source}: a sibling on the axis '{sibling.axis}', and the run is on "
                f"'{own.axis}': B differs between axes, so fit both on one"
            )
    kept, dropped = _others(siblings, own)
    if len(kept) < MIN_SIBLINGS:
        why = "as the run itself, a duplicate, or fitted by no family"
        without = f" (left out: {', '.join(dropped)}, {why})" if dropped else ""
        return None, f"no campaign prior: needs {MIN_SIBLINGS} sibling runs, found {len(kept)}{without}"
    names = [family.name for family in own.posterior.families]
    families = tuple(_family_prior(kept, index, name) for index, name in enumerate(names))
    prior = CampaignPrior(len(kept), families, dropped)
    return prior, str(prior)


def check_siblings(records: Sequence[RunRecord]) -> None:
    """Reject runs that were evaluated on other prompts, as far as prompts are on record; the run comes first.

    Raises:
        InputError: the prompts of a run's evaluations are not those of the first run that has any on record.
    """
    first: tuple[RunRecord, set[str]] | None = None
    for record in records:
        # Foreign logs have no hash of their prompts: what is not on record cannot be checked.
        prompts = {str(row["prompt_set"]) for row in record.eval_prompts() if row.get("prompt_set")}
        if not prompts:
            continue
        if first is None:
            first = record, prompts
        elif prompts != first[1]:
            raise InputError(
                f"{record.path / 'eval_prompts.jsonl'}: prompt set {', '.join(sorted(prompts))}, but "
                f"{first[0].path} has {', '.join(sorted(first[1]))}: siblings need the same held-out prompts"
            )


def _others(siblings: Sequence[Fit], own: Fit) -> tuple[list[Fit], tuple[str, ...]]:
    """Return the siblings that are distinct runs without a misfit, and the sources of the rest."""
    kept: list[Fit] = []
    dropped = []
    for sibling in siblings:
        if sibling.misfit or any(_same_run(sibling.points, other.points) for other in (own, *kept)):
            dropped.append(sibling.points.source)
        else:
            kept.append(sibling)
    return kept, tuple(dropped)


def _same_run(one: Points, other: Points) -> bool:
    """Return whether both come from one file, or one has all evaluations of the other (an earlier stage)."""
    # Points from arrays all have the same default source, which says nothing.
    if one.source == other.source != Points.source:
        return True
    seen, also = (
        {(c, y) for c, y in zip(p.compute_N.tolist(), p.pass_rate_N.tolist(), strict=True) if c > 0}
        for p in (one, other)
    )
    return seen <= also or also <= seen


def _family_prior(siblings: Sequence[Fit], index: int, name: str) -> FamilyPrior:
    # Family by family: the same run has another B in each family.
    posts = [sibling.posterior.only(index) for sibling in siblings]
    log_b, spread = _mean_and_spread([(post.log_b_cells, post.weight_cells) for post in posts])
    A, A_spread = _mean_and_spread([(post.A, post.weight) for post in posts])
    # sqrt(1 + 1/k): the mean of the siblings is itself uncertain.
    scale = max(spread, LOG_B_FLOOR) * math.sqrt(1.0 + 1.0 / len(posts))
    return FamilyPrior(name, log_b, scale, A, max(A_WIDER * A_spread, A_FLOOR))


def _mean_and_spread(posteriors: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return the mean over siblings, and their sd or the root mean square of their errors, if larger."""
    mean_k = np.array([float(np.sum(value * weight)) for value, weight in posteriors])
    square_k = np.array([float(np.sum(value**2 * weight)) for value, weight in posteriors])
    error = math.sqrt(max(float(np.mean(square_k - mean_k**2)), 0.0))
    return float(mean_k.mean()), max(float(mean_k.std(ddof=1)), error)
