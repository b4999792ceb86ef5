"""The recipe `demo`, small: overrides for runs of 4 groups of 8 a step, in a few seconds."""


def small_demo(steps, evaluations, *more):
    """Overrides for so many steps and evaluations; `more` overrides come after these, and win."""
    return [
        *("task.k_max=2", "task.heldout_per_length=40", "context.prompt=6", "context.thinking=4"),
        *("length.low=3", "length.high=4", "batch.prompts=4", "batch.samples=8", "decode_slots=96"),
        *("optimiser.lr=3e-4", "budget.kind=steps", f"budget.amount={steps}"),
        *(f"evaluation.count={evaluations}", "evaluation.samples=2", *more),
    ]
