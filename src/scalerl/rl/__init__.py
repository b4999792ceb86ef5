"""Training: prompts -> rollouts -> verified groups -> advantages -> loss -> weights -> generators.

    train.py      a run, from recipe to run folder; training_run.py its parts, and what follows every step
    evaluate.py   a model on the held-out prompts
    types.py      what flows along the arrows
    config/ algo/ tasks/ sandbox/    what a recipe says; where code that a model wrote runs
    model/ kernels/ engine/ learner/ sync/ verify/ workers/ checkpoint/     the parts
    placement/ loop/ health/ tracking/                                      where they are, and the run

    a loss (CISPO) and its equation                algo/loss.py
    PipelineRL(k); where k is enforced             algo/schedule.py; loop/admission.py
    zero-variance groups dropped                   learner/batch.py
    reward of a completion                         verify/verifier.py, tasks/; its penalties loop/pipeline.py
    weights sent to the generators                 sync/; called in loop/pipeline.py and placement/
    a lost worker replaced                         workers/pool.py
    a forecast frozen                              training_run.py; made in ../forecast/freeze.py
    GPU-hours                                      loop/counters.py, summed in ../record/evaluation.py
    what `kind` names, a class of your own too     ../kinds.py; docs/extend

A room imports only those before it: types.py, algo, sandbox, tasks, config, kernels, model, workers,
checkpoint, verify, sync, engine, learner, placement, health, loop, tracking. `scalerl.study`, `scalerl.plan`
and `scalerl.cli` import this; it imports `scalerl.record`, and none of the rooms that fit, show or compare.

Imported by `cli`, `study`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.rl.algo.advantage import Advantage, BatchStd, LeaveOneOut, NoStd, PromptStd
    from scalerl.rl.algo.averaging import (
        Averaging,
        ConstantAverage,
        PromptAverage,
        SampleAverage,
        TokenAverage,
    )
    from scalerl.rl.algo.curriculum import Curriculum, History, NoPositiveResampling, Uniform
    from scalerl.rl.algo.length import ForcedInterruption, LengthControl, LengthPenalty, NoLengthControl
    from scalerl.rl.algo.loss import Cispo, Dapo, Grpo, Gspo, Kl, Loss, Reinforce, TokenLoss
    from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
    from scalerl.rl.config.cluster import Cluster, Fsdp2, Vllm
    from scalerl.rl.config.health import Health
    from scalerl.rl.config.optimiser import AdamW
    from scalerl.rl.config.recipe import Recipe, load_recipe
    from scalerl.rl.config.settings import (
        BatchSize,
        BuiltInEngine,
        Checkpointing,
        Context,
        Epochs,
        Evaluation,
        FlopsBudget,
        GpuHours,
        Inline,
        LearnerSettings,
        Local,
        Lora,
        Steps,
        Suite,
        Timeouts,
        TokensBudget,
        Tracking,
    )
    from scalerl.rl.evaluate import evaluate
    from scalerl.rl.loop.progress import Progress
    from scalerl.rl.placement.evaluate import EvaluationResult
    from scalerl.rl.tasks.chain import Chain
    from scalerl.rl.tasks.code import Code
    from scalerl.rl.tasks.dataset import Dataset
    from scalerl.rl.tasks.environment import Environment
    from scalerl.rl.tasks.task import Task
    from scalerl.rl.tasks.verifiers import Exact, Function, Math, Verifier
    from scalerl.rl.tracking.tracker import SampleTracker, TrackedRun, Tracker
    from scalerl.rl.train import train
    from scalerl.rl.types import Limits, Prompt, Reward, UserText

__all__ = [
    "AdamW",
    "Advantage",
    "Averaging",
    "BatchSize",
    "BatchStd",
    "BuiltInEngine",
    "Chain",
    "Checkpointing",
    "Cispo",
    "Cluster",
    "Code",
    "ConstantAverage",
    "Context",
    "Curriculum",
    "Dapo",
    "Dataset",
    "Environment",
    "Epochs",
    "Evaluation",
    "EvaluationResult",
    "Exact",
    "FlopsBudget",
    "ForcedInterruption",
    "Fsdp2",
    "Function",
    "GpuHours",
    "Grpo",
    "Gspo",
    "Health",
    "History",
    "Inline",
    "Kl",
    "LearnerSettings",
    "LeaveOneOut",
    "LengthControl",
    "LengthPenalty",
    "Limits",
    "Local",
    "Lora",
    "Loss",
    "Math",
    "NoLengthControl",
    "NoPositiveResampling",
    "NoStd",
    "OffPolicy",
    "PipelineRL",
    "Progress",
    "Prompt",
    "PromptAverage",
    "PromptStd",
    "Recipe",
    "Reinforce",
    "Reward",
    "SampleAverage",
    "SampleTracker",
    "Steps",
    "Suite",
    "Task",
    "Timeouts",
    "TokenAverage",
    "TokenLoss",
    "TokensBudget",
    "TrackedRun",
    "Tracker",
    "Tracking",
    "Uniform",
    "UserText",
    "Verifier",
    "Vllm",
    "evaluate",
    "load_recipe",
    "train",
]

lazy(__name__)
