"""The budget of a run: how much is spent, and how a resume may change it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from scalerl.errors import InputError, brief
from scalerl.jsonl import plain, read_last
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.batch import Fate


def spent(kind: str, row: Mapping[str, Any], n_prompts: int) -> float:
    """Return how much a run has spent, in the unit of its kind of budget.

    Args:
        kind: kind of the budget.
        row: the counters of a line of steps.jsonl: `step`, `flops`, `tokens`, `device_seconds`, and a
            `ledger` with the fates of the groups consumed.
        n_prompts: training prompts, retired ones included.
    """
    if kind == "steps":
        return float(row["step"])
    if kind == "flops":
        return float(sum(row["flops"].values()))
    if kind == "gpu_hours":
        return sum(row["device_seconds"][role] for role in ("generate", "train", "idle")) / 3600
    if kind == "tokens":
        return float(row["tokens"]["generated"])
    # Epochs count every consumed group, whether or not it was trained.
    return sum(row["ledger"][fate] for fate in get_args(Fate)) / n_prompts


def check_budget(folder: Path, before: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise an InputError if a run with the budget `before` cannot continue with that of `recipe`.

    It cannot if the kind differs, more is spent already, or the learning rate decays over the budget."""
    now = recipe.budget
    if (kind := before.get("kind")) != now.kind:
        raise InputError(
            f"{folder}: the run has budget.kind = {kind!r}, and this recipe {now.kind!r}: a resume may "
            "change budget.amount; a budget of another kind is another run (-o)"
        )
    # Nothing is spent before the first line, so any amount is valid.
    if now.amount == before.get("amount") or not (last := read_last(folder / "steps.jsonl")):
        return
    optimiser = recipe.optimiser
    if optimiser.lr_scheduler != "constant" and not optimiser.decay_steps:
        raise InputError(
            f"{folder}: the learning rate of the run decays over its budget of {before['amount']:g} steps, "
            "and with another the steps made would have had other rates: a run that is to be extended sets "
            "optimiser.decay_steps; this recipe is another run (-o)"
        )
    # Only epochs need the prompts, which may have to be downloaded.
    used = spent(now.kind, last, len(recipe.task.prompts("train")) if now.kind == "epochs" else 1)
    if now.amount < used:
        raise InputError(
            f"{folder}: budget.amount = {now.amount:g} is less than the {used:g} {now.kind} that the run has "
            "spent: give that or more"
        )


def changes_of_budget(config: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the change of config.json if the amount differs: `budget`, with earlier amounts as `before`."""
    before, (kind, amount) = amounts(config), recipe.budget_on_axis()
    if before[-1] == plain(amount):
        return {}
    return {"budget": {"kind": kind, "amount": amount, "before": before}}


def amounts(config: Mapping[str, Any]) -> list[float]:
    """Return the amounts that the budget of a run has had, the current one last.

    Raises:
        InputError: config.json was edited and has no amount.
    """
    budget = config.get("budget")
    if not isinstance(budget, Mapping) or not isinstance(budget.get("amount"), (int, float)):
        raise InputError(f"config.json: budget is {brief(budget)}, without an amount: put back what was")
    return [*budget.get("before", []), budget["amount"]]
