"""PipelineRL: the names of its actor (rewards, tests) and of its trainer (the rest), which log to a run each.

From the main branch of June 2026, which has no versions: pipelinerl/actor.py (`publish_stats`),
pipelinerl/finetune_loop.py, pipelinerl/finetune/rl/__init__.py.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

PIPELINE_RL = Vocabulary(
    trainer="pipeline-rl",
    signs=(
        *("actor/success_mean", "actor/test_success_mean", "actor/reward_mean"),
        *("actor/trainer_model_version", "rl/ess", "rl/ratio_new_old", "stats/completed_steps"),
        "throughput/sec_per_step",
    ),
    # One completion for every test problem, over all test sets. Those of single sets
    # (actor/<set>/success_mean) are named as the sets of training are, and cannot be told from them.
    pass_rate=("actor/test_success_mean",),
    eval_reward=("actor/test_reward_mean",),
    # `success` is the share that is right; rewards may have penalties.
    train_reward=("actor/success_mean", "actor/reward_mean", "rl/reward"),
    entropy=("rl/entropy",),
    # Completions that did not finish by themselves.
    truncated=("actor/overflow_mean",),
    ratio_clipped=("rl/clamp_log_ratio_new_old_indicator",),
    # No age: stats/lag is the largest one of a step, and in samples, by which versions are numbered here.
    mean_length=("actor/output_tokens_mean",),
    kl=("rl/kl",),
    grad_norm=("stats/grad_norm",),
    loss=("rl/loss",),
    lr=("stats/lr",),
    # Waiting for data included. Tests are done by the actor, beside training.
    step_seconds=("throughput/sec_per_step",),
    # Prompts included: those of the first process, times the number of processes.
    tokens=("throughput/tokens_per_step",),
    tokens_so_far=("stats/tokens",),
    # A version of the weights is called by the samples that were trained on for it, and an evaluation is
    # logged beside its own: the actor's run has the compute of its tests, without a row of the trainer's.
    samples_so_far=("stats/samples", "actor/trainer_model_version"),
    # The config has shares of the GPUs (world.actor_fraction), not their number.
)
"""Values of the trainer are of one step. The actor logs when the model has a new version, with no step of its
own: `actor/trainer_model_version` is the number of samples trained so far."""
