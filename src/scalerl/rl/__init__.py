"""Training: prompts -> rollouts -> verified groups -> advantages -> loss -> weights -> generators.

    train.py      runs a recipe into a run folder; training_run.py: its parts, and the work after every step
    evaluate.py   evaluates a model on the held-out prompts
    types.py      the types that flow along the arrows
    config/ algo/ tasks/ sandbox/    the choices of a recipe; where code written by a model runs
    model/ kernels/ engine/ learner/ sync/ verify/ workers/ checkpoint/     the parts
    placement/ loop/ health/ tracking/                                      where they run, and the run itself

    a loss (CISPO) and its equation                algo/loss.py
    PipelineRL(k); where k is enforced             algo/schedule.py; loop/admission.py
    zero-variance groups dropped                   learner/batch.py
    reward of a completion                         verify/verifier.py, tasks/; its penalties loop/pipeline.py
    weights sent to the generators                 sync/; called in loop/pipeline.py and placement/
    a lost worker replaced                         workers/pool.py
    a forecast frozen                              training_run.py; made in ../forecast/freeze.py
    GPU-hours                                      loop/counters.py, summed in ../record/evaluation.py
    what `kind` names, custom classes included     ../kinds.py; docs/extend

A room imports only those before it: types.py, algo, sandbox, tasks, config, kernels, model, workers,
checkpoint, verify, sync, engine, learner, placement, health, loop, tracking. `scalerl.study`, `scalerl.plan`
and `scalerl.cli` import this; it imports `scalerl.record`, but no room that fits, shows or compares runs.

Imported by `cli`, `study`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.rl.algo.advantage import (
        Advantage as Advantage,
        BatchStd as BatchStd,
        LeaveOneOut as LeaveOneOut,
        NoStd as NoStd,
        PromptStd as PromptStd,
    )
    from scalerl.rl.algo.averaging import (
        Averaging as Averaging,
        ConstantAverage as ConstantAverage,
        PromptAverage as PromptAverage,
        SampleAverage as SampleAverage,
        TokenAverage as TokenAverage,
    )
    from scalerl.rl.algo.curriculum import (
        Curriculum as Curriculum,
        History as History,
        NoPositiveResampling as NoPositiveResampling,
        Uniform as Uniform,
    )
    from scalerl.rl.algo.length import (
        ForcedInterruption as ForcedInterruption,
        LengthControl as LengthControl,
        LengthPenalty as LengthPenalty,
        NoLengthControl as NoLengthControl,
    )
    from scalerl.rl.algo.loss import (
        Cispo as Cispo,
        Dapo as Dapo,
        Decoupled as Decoupled,
        Grpo as Grpo,
        Gspo as Gspo,
        Kl as Kl,
        Loss as Loss,
        Reinforce as Reinforce,
        TokenLoss as TokenLoss,
    )
    from scalerl.rl.algo.schedule import OffPolicy as OffPolicy, PipelineRL as PipelineRL
    from scalerl.rl.config.cluster import (
        Cluster as Cluster,
        ClusterTimeouts as ClusterTimeouts,
        Fsdp2 as Fsdp2,
        OneProcess as OneProcess,
        Resources as Resources,
        Transport as Transport,
    )
    from scalerl.rl.config.engine import BuiltInEngine as BuiltInEngine, Vllm as Vllm
    from scalerl.rl.config.health import Health as Health, Thresholds as Thresholds
    from scalerl.rl.config.optimiser import AdamW as AdamW
    from scalerl.rl.config.recipe import Recipe as Recipe, load_recipe as load_recipe
    from scalerl.rl.config.settings import (
        BatchSize as BatchSize,
        Checkpointing as Checkpointing,
        Context as Context,
        Epochs as Epochs,
        Evaluation as Evaluation,
        FlopsBudget as FlopsBudget,
        GpuHours as GpuHours,
        Inline as Inline,
        LearnerSettings as LearnerSettings,
        Local as Local,
        Lora as Lora,
        Samples as Samples,
        Steps as Steps,
        Suite as Suite,
        Timeouts as Timeouts,
        TokensBudget as TokensBudget,
        Tracking as Tracking,
    )
    from scalerl.rl.evaluate import evaluate as evaluate
    from scalerl.rl.loop.progress import Progress as Progress
    from scalerl.rl.placement.evaluate import EvaluationResult as EvaluationResult
    from scalerl.rl.tasks.chain import Chain as Chain
    from scalerl.rl.tasks.code import Code as Code
    from scalerl.rl.tasks.dataset import Dataset as Dataset
    from scalerl.rl.tasks.environment import Environment as Environment
    from scalerl.rl.tasks.mix import Mix as Mix
    from scalerl.rl.tasks.reasoning_gym import ReasoningGym as ReasoningGym
    from scalerl.rl.tasks.task import Task as Task
    from scalerl.rl.tasks.taskset import VerifiersTaskset as VerifiersTaskset
    from scalerl.rl.tasks.verifiers import (
        Exact as Exact,
        Function as Function,
        Math as Math,
        Trl as Trl,
        Verifier as Verifier,
        Verl as Verl,
    )
    from scalerl.rl.tracking.tracker import (
        SampleTracker as SampleTracker,
        TrackedRun as TrackedRun,
        Tracker as Tracker,
    )
    from scalerl.rl.train import train as train
    from scalerl.rl.types import Limits as Limits, Prompt as Prompt, Reward as Reward, UserText as UserText


lazy(__name__)
