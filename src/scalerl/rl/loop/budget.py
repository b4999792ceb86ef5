"""What a run has spent of its budget, and what a resume may make of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from scalerl.errors import InputError, brief
from scalerl.jsonl import plain, read_last
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.batch import Fate


def spent(kind: str, row: Mapping[str, Any], n_prompts: int) -> float:
    """Return what is spent of a budget of this kind, in its unit.

    Args:
        kind: of the budget.
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
    # Epochs: by the groups consumed, whatever became of them.
    return sum(row["ledger"][fate] for fate in get_args(Fate)) / n_prompts


def check_budget(folder: Path, before: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise an InputError where a run whose recipe had the budget `before` cannot go on with that of
    `recipe`: its kind is another, it is less than what is spent, or the learning rate decays over it.
    """
    now = recipe.budget
    if (kind := before.get("kind")) != now.kind:
        raise InputError(
            f"{folder}: the run has budget.kind = {kind!r}, and this recipe {now.kind!r}: a resume may "
            "change budget.amount; a budget of another kind is another run (-o)"
        )
    # Nothing is spent before the first line: any amount will do.
    if now.amount == before.get("amount") or not (last := read_last(folder / "steps.jsonl")):
        return
    optimiser = recipe.optimiser
    if optimiser.lr_scheduler != "constant" and not optimiser.decay_steps:
        raise InputError(
            f"{folder}: the learning rate of the run decays over its budget of {before['amount']:g} steps, "
            "and with another the steps made would have had other rates: a run that is to be extended sets "
            "optimiser.decay_steps; this recipe is another run (-o)"
        )
    # Prompts are loaded for epochs alone: that may take a download.
    used = spent(now.kind, last, len(recipe.task.prompts("train")) if now.kind == "epochs" else 1)
    if now.amount < used:
        raise InputError(
            f"{folder}: budget.amount = {now.amount:g} is less than the {used:g} {now.kind} that the run has "
            "spent: give that or more"
        )


def changes_of_budget(config: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return what another amount changes in config.json: `budget`, with the amounts `before`."""
    before, (kind, amount) = amounts(config), recipe.budget_on_axis()
    if before[-1] == plain(amount):
        return {}
    return {"budget": {"kind": kind, "amount": amount, "before": before}}


def amounts(config: Mapping[str, Any]) -> list[float]:
    """Return the amounts that the budget of a run has had, the present one last.

    Raises:
        InputError: config.json was edited, and has none.
    """
    budget = config.get("budget")
    if not isinstance(budget, Mapping) or not isinstance(budget.get("amount"), (int, float)):
        raise InputError(f"config.json: budget is {brief(budget)}, without an amount: put back what was")
    return [*budget.get("before", []), budget["amount"]]
