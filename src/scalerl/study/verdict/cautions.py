"""The cautions of a study: sentences on what its runs do not show."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from scalerl.numbers import as_mapping, rate, rate_interval, signed, unit_for
from scalerl.own_code import codes_in
from scalerl.study.record import ArmPlan, StudyRecord
from scalerl.study.verdict.arm_fits import ArmSummary

RATIO_IS_ONE = 1.01
"""The largest importance ratio regarded as 1; float32 kernels alone make it differ from 1 by 1e-5."""
FEWEST_SEEDS = 3
ENOUGH_C_MID = 3.0
"""Multiple of C_mid that a run should reach: A is seldom identified below (docs/explanation/compare.md)."""

_OF_STEPS = ("step", "reward_mean", "loss", "mean_length")
"""Fields of steps.jsonl in which two runs differ as soon as the difference of their recipes takes effect."""


def cautions(study: StudyRecord, arms: Sequence[ArmSummary], axis: str) -> tuple[str, ...]:
    """Return the cautions that apply to a study; unsolved tasks and the losses come first."""
    unsolved = [name for name, pass_rate in unmoved(study).items() if pass_rate == 0]
    solved = [arm for arm in arms if arm.name not in unsolved]
    found = []
    if unsolved:
        found.append(
            f"No held-out prompt was ever solved in {_listed(unsolved)}: the study says nothing of what they "
            "change. Look at samples.jsonl of a run, and try easier problems or another template."
        )
    return (
        *found,
        *_of_ratios(study),
        *_missing(arms),
        *_shared_models(study),
        *_made_otherwise(study),
        *_combined(study),
        *_unlike_before(study),
        *_off_known(arms, solved),
        *_inert(study),
        *(text for arm in solved for text in _short(arm, axis)),
    )


def unmoved(study: StudyRecord) -> dict[str, float]:
    """Return the pass rate of every arm whose evaluations, two or more in a run, all have the same one."""
    found: dict[str, float] = {}
    for arm in study.arms:
        runs = [run.record.evals for run in study.of_arm(arm.name) if run.record is not None]
        rates = {point.pass_rate for evals in runs for point in evals}
        if len(rates) == 1 and max(map(len, runs)) > 1:
            found[arm.name] = rates.pop()
    return found


def _ratios(study: StudyRecord, arm: ArmPlan) -> tuple[bool | None, bool | None]:
    """Return whether an arm's importance ratios stay at 1, and whether no bound acts on any; None if unknown.

    This is read from the logged steps, or inferred from the recipe's schedule if no step has ratios.
    """
    runs = [run.record.columns() for run in study.of_arm(arm.name) if run.record is not None]
    # A skipped step trains nothing, and its ratios are NaN.
    highest, acted = (
        max((float(np.nanmax(run[name])) for run in runs if name in run), default=math.nan)
        for name in ("ratio_max", "ratio_clipped")
    )
    never = None if math.isnan(acted) else acted == 0
    if math.isnan(highest):
        schedule = as_mapping(arm.recipe.get("schedule"))
        # OffPolicy(1) makes one update per batch of its own samples; PipelineRL(0) waits for each update.
        on_policy = 1 if schedule.get("kind") == "off_policy" else 0
        return schedule["k"] == on_policy if "k" in schedule else None, never
    return highest <= RATIO_IS_ONE and never is not False, never


def _of_ratios(study: StudyRecord) -> Iterator[str]:
    """Name the arms whose importance ratios stay at 1, and those whose loss bound never acts."""
    ratios = {arm.name: _ratios(study, arm) for arm in study.arms}
    if names := [name for name, (stay_1, _) in ratios.items() if stay_1]:
        still = {arm.name: arm.recipe for arm in study.arms if arm.name in names}
        rest = {name: {k: v for k, v in r.items() if k not in ("loss", "name")} for name, r in still.items()}
        alike = [
            name
            for name in still
            if any(rest[name] == rest[o] and still[name].get("loss") != still[o].get("loss") for o in still)
        ]
        yield (
            f"The importance ratios never leave 1 in {_listed(names)}, and no bound of a loss acts there: "
            "arms that differ in their loss or its bound alone cannot be distinguished"
            f"{f', as {_listed(alike)} do' if alike else ''}."
        )
    losses = {arm.name: as_mapping(arm.recipe.get("loss")) for arm in study.arms}
    bounded = [name for name, loss in losses.items() if loss.get("max_ratio") is not None]
    if idle := [name for name in bounded if ratios[name][1] and not ratios[name][0]]:
        yield f"The bound of the loss never acts in {_listed(idle)}: the study does not test its value there."


def _missing(arms: Sequence[ArmSummary]) -> Iterator[str]:
    """Name the arms with few seeds, and those judged only by the runs that did not fail."""
    if few := [f"{arm.name} ({len(arm.fits)})" for arm in arms if len(arm.fits) < FEWEST_SEEDS]:
        yield (
            f"Fewer than {FEWEST_SEEDS} seeds with a fit: {_listed(few)}. How far seeds are apart then rests "
            "on a prior, and a difference has to be large to be detected."
        )
    lost = [
        f"{arm.name} (by {len(arm.fits)} of {len(arm.runs)})"
        for arm in arms
        if arm.stability.outcomes.get("failed", 0) and 0 < len(arm.fits) < len(arm.runs)
    ]
    if lost:
        yield f"Judged by the runs that were left, which are those that did not fail early: {_listed(lost)}."


def _shared_models(study: StudyRecord) -> Iterator[str]:
    seeds = {(run.plan.seed, run.plan.model) for run in study.runs}
    models = {model for _, model in seeds}
    # If one seed has several models, the arms have base models of their own, which is another design.
    one_model_each = len(seeds) == len({seed for seed, _ in seeds})
    if one_model_each and 1 < len(models) < len(seeds):
        yield (
            f"{len(seeds)} seeds begin from {len(models)} base models: what an arm does to one it does to "
            f"all its seeds, so that as evidence of other base models they count as {len(models)}. "
            "Verdicts on arms and standard errors of what was measured count them so."
        )


def _made_otherwise(study: StudyRecord) -> Iterator[str]:
    """Name devices, versions and custom kinds that differ between runs, by their config.json."""
    made: dict[str, Counter[str]] = {}
    codes: dict[str, set[str]] = {}
    for run in study.runs:
        config = run.record.config if run.record else {}
        devices = {str(device) for device in as_mapping(config.get("devices")).values()}
        machine = {"devices": " and ".join(sorted(devices))} if devices else {}
        for key, value in {**as_mapping(config.get("versions")), **machine}.items():
            made.setdefault(key, Counter())[str(value)] += 1
        for kind, found in codes_in(config).items():
            codes.setdefault(kind, set()).update(found)
    unlike = [
        f"{key} ({', '.join(f'{value} in {n}' for value, n in found.items())})"
        for key, found in made.items()
        if len(found) > 1
    ]
    if unlike:
        yield (
            f"The runs were not all made with the same {_listed(unlike)}. Runs of one seed then differ by "
            "more than their arms: time does where devices do, and pass rates where kernels do."
        )
    if changed := sorted(kind for kind, found in codes.items() if len(found) > 1):
        yield f"Not all runs were trained by the same code: between them {_listed(changed)} was changed."


def _combined(study: StudyRecord) -> Iterator[str]:
    rows = [row for row in study.decisions if row["decision"] == "combined"]
    made = [row["arm"] for row in rows if len(row["of"]) > 1]
    for arm in made:
        yield (
            f"{arm} was made of the arms that were ahead of these very runs of {study.plan['base']}: luck of "
            "those is in its lead. Seeds that were added after it was chosen have none of that."
        )
    if rows and not made:
        ahead = f"{rows[-1]['of'][0]} alone is" if rows[-1]["of"] else "no arm is"
        yield f"Nothing was combined: {ahead} ahead of {study.plan['base']} as measured at the end."


def _unlike_before(study: StudyRecord) -> Iterator[str]:
    """Name arms that are evaluated differently: before training, their pass rate is not that of the first."""
    first = study.arms[0].name
    before = {
        (run.plan.arm, run.plan.seed): (run.plan.model, run.record.evals[0].pass_rate)
        for run in study.runs
        if run.record is not None and run.record.evals and run.record.evals[0].step == 0
    }
    unlike: dict[str, float] = {}
    for (arm, seed), (model, pass_rate) in before.items():
        first_model, first_rate = before.get((first, seed), (None, math.nan))
        # Exactly equal: the same weights, prompts and random numbers must give the same completions.
        if model == first_model and pass_rate != first_rate:
            unlike[arm] = pass_rate - first_rate
    if unlike:
        shown = [f"{arm} ({signed(difference)})" for arm, difference in unlike.items()]
        yield (
            f"Before any training, from one base model, these differ from {first}: {_listed(shown)}. They "
            "are evaluated otherwise (lengths, temperature or precision), or the model's files were changed, "
            "and what is said of them has that in it."
        )


def _off_known(arms: Sequence[ArmSummary], solved: Sequence[ArmSummary]) -> Iterator[str]:
    """Name arms whose fitted ceiling is above the one known beforehand, and those of `solved` below it."""
    above = [arm for arm in arms if arm.above]
    if found := [f"{a.name} ({rate(a.quantities['A'].median)}, known {rate(a.above)})" for a in above]:
        yield (
            f"The fitted ceiling is above the one known beforehand in {_listed(found)}: its curve is none of "
            "the families, and nothing is claimed of its ceiling."
        )
    below = [arm for arm in solved if "A" in arm.quantities]
    below = [arm for arm in below if arm.quantities["A"].interval[1] < arm.known_ceiling]
    if found := [
        f"{arm.name} ({rate_interval(arm.quantities['A'].interval)}, known {rate(arm.known_ceiling)})"
        for arm in below
    ]:
        yield (
            f"The fitted ceiling lies below the one known beforehand in {_listed(found)}: they stop there, "
            "or creep on as no family of curves does, which only longer runs can show."
        )


def _inert(study: StudyRecord) -> Iterator[str]:
    """Name pairs of arms with the same runs, except pairs with the base, which the verdict covers."""
    base = study.plan["base"]
    if twins := [f"{name} and {other}" for other, name in same_runs(study) if base not in (name, other)]:
        yield (
            f"The runs of {_listed(twins)} are the same, evaluation for evaluation and step for step: what "
            "they differ in never acted."
        )


def same_runs(study: StudyRecord) -> list[tuple[str, str]]:
    """Return pairs of arms whose runs have the same evaluations and steps: their difference never acted.

    Arms whose pass rate never moved are left out, as their evaluations are the same whatever they change.
    """
    still = unmoved(study)
    records = {
        arm.name: [run.record for run in study.of_arm(arm.name)]
        for arm in study.arms
        if arm.name not in still
    }
    rates = {
        name: [[(point.step, point.pass_rate) for point in one.evals] if one else [] for one in of_arm]
        for name, of_arm in records.items()
    }

    def steps(name: str) -> list[list[bytes]]:
        # As bytes, since NaN is not equal to itself.
        columns = [one.columns() if one is not None else {} for one in records[name]]
        return [[one[key].tobytes() if key in one else b"" for key in _OF_STEPS] for one in columns]

    # Exact equality is the test, as a difference that acts once changes all later samples.
    return [
        (one, other)
        for one, other in itertools.combinations(rates, 2)
        if rates[one] == rates[other] and any(rates[one]) and steps(one) == steps(other)
    ]


def _short(arm: ArmSummary, axis: str) -> Iterator[str]:
    """Describe an arm whose runs are too short to identify the ceiling, and the compute that may suffice."""
    sound = [fit for fit in arm.fits if not fit.misfit]
    if not sound:
        return
    # Medians over seeds, as one run that was stopped early is no reason for a caution.
    reach = statistics.median(fit.c_max_over_c_mid for fit in sound)
    open_runs = [fit for fit in sound if not fit.identified]
    if reach >= ENOUGH_C_MID and 2 * len(open_runs) <= len(sound):
        return
    text = f"{arm.name}: the runs reach {reach:.2g} C_mid"
    text += f", less than {ENOUGH_C_MID:g}" if reach < ENOUGH_C_MID else ""
    text += f"; the ceiling is identified in {len(sound) - len(open_runs)} of {len(sound)}"
    known = sorted(fit.compute_to_identify for fit in open_runs if fit.compute_to_identify is not None)
    if not open_runs:
        yield f"{text}."
    elif 2 * len(known) <= len(open_runs):
        yield f"{text}, and eight times the compute may not identify it."
    else:
        needed = unit_for(axis, statistics.median(known)).show(statistics.median(known))
        yield f"{text}, and about {needed} is expected to identify it in the others."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
