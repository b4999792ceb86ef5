"""The recipe of small runs: a step in a few hundredths of a second, with groups that have a signal."""

from dataclasses import replace

from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Checkpointing, Context, Evaluation, Samples, Steps
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.tasks.chain import Chain, Demonstrations

TASK = Chain(k_max=2, heldout_per_length=10, train_per_length=20)


def small_model(folder):
    """A model that knows the form of an answer, and guesses: its groups have a signal."""
    spec = BaseModel(Demonstrations(TASK, 6), hidden_size=48, max_careful_steps=300, imperfect_steps=60)
    return build_base(spec, folder)


def learner_recipe(**changes):
    """A recipe for a learner that is given its model: the task is not used."""
    return Recipe(model="", task=TASK, budget=Steps(1), **changes)


def small_recipe(model, **changes):
    """Three groups of six a step, k = 2, a checkpoint every third step, an evaluation every second."""
    recipe = Recipe(
        model=str(model),
        task=TASK,
        budget=Steps(14),
        length=ForcedInterruption(phrase="! </think>", low=2, high=6),
        context=Context(prompt=8, thinking=6, answer=4),
        batch=BatchSize(prompts=3, samples=6, micro=7),
        optimiser=AdamW(lr=1e-3, warmup_steps=3),
        schedule=PipelineRL(k=2),
        decode_slots=20,
        evaluation=Evaluation(count=7, samples=2, forecast_at=(0.3, 0.8)),
        checkpoint=Checkpointing(steps=3, minutes=0),
        samples=Samples(evaluation=3, every=4, training=2),
    )
    return replace(recipe, **changes)
