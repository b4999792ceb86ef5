"""verl: the names that its PPO trainers log (GRPO and DAPO are settings of these).

From verl 0.9.1, and `val/test_score` of 0.1 to 0.3: trainer/ppo/ray_trainer.py and
trainer/ppo/v1/trainer_base.py (the loops), trainer/ppo/metric_utils.py (most names), workers/utils/losses.py
and trainer/ppo/core_algos.py (those of the actor). The fully asynchronous trainer, in experimental/, logs the
same ones.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

VERL = Vocabulary(
    trainer="verl",
    signs=(
        *("val-core/*", "val-aux/*", "val/test_score/*", "critic/score/mean", "critic/rewards/mean"),
        *("response_length/clip_ratio", "timing_s/step", "perf/total_num_tokens", "actor/pg_clipfrac"),
    ),
    # Every validation set has its own, and there is no mean over them. `acc` is the share that is right;
    # `reward` may be 1 and -1 (math_dapo), or have a penalty for length. best@N and maj@N are no pass rates.
    # Up to 0.3 `test_score` is the mean reward of a set.
    pass_rate=("val-core/{set}/acc/mean@*", "val-aux/{set}/acc/mean@*"),
    eval_reward=("val-core/{set}/reward/mean@*", "val-aux/{set}/reward/mean@*", "val/test_score/{set}"),
    # The score is what the reward function gave: 1 and -1 for math_dapo. `rewards` are less a penalty of KL.
    train_reward=("critic/score/mean", "critic/rewards/mean"),
    # `entropy_loss` is the mean entropy too, of the same tokens while they are trained on.
    entropy=("actor/entropy", "actor/entropy_loss"),
    # Share of responses as long as the batch is wide. That is the budget of tokens in the trainer of before
    # 0.9; the one since (trainer.use_v1) pads to the longest response, so that one at least counts in every
    # batch.
    truncated=("response_length/clip_ratio",),
    ratio_clipped=("actor/pg_clipfrac",),
    # By the last version that had a part in a trajectory; the one by the first is trajectory_staleness_worst.
    staleness_mean=("training/off_policy/trajectory_staleness/mean",),
    mean_length=("response_length/mean",),
    # To the reference policy. `actor/ppo_kl` is that of a step to its start.
    kl=("actor/kl_loss", "actor/reward_kl_penalty"),
    grad_norm=("actor/grad_norm",),
    loss=("actor/pg_loss",),
    lr=("actor/lr",),
    # Since 0.6 validation comes after the step and is not in its seconds, for which `timing_s/testing` is not
    # taken off. Up to 0.5 it was in them. A checkpoint is in them, but for 0.6 and 0.7.0.
    step_seconds=("timing_s/step", "perf/time_per_step"),
    # Of one step, prompts and responses.
    tokens=("perf/total_num_tokens",),
    # Rollouts have GPUs of their own where `rollout` has nodes. It is at the top of the config of the fully
    # asynchronous trainer, whose fully_async_main.py copies them below actor_rollout_ref, and there alone of
    # the others: 0 nodes where rollouts share those of training.
    device_sums=(
        "trainer.n_gpus_per_node * trainer.nnodes + rollout.n_gpus_per_node * rollout.nnodes",
        "trainer.n_gpus_per_node * trainer.nnodes"
        " + actor_rollout_ref.rollout.n_gpus_per_node * actor_rollout_ref.rollout.nnodes",
        "trainer.n_gpus_per_node * trainer.nnodes",
    ),
    # Of one step; the fully asynchronous trainer has a train_batch_size of 0.
    sample_sums=("data.train_batch_size * actor_rollout_ref.rollout.n",),
)
"""Values are those of one step. Validation is logged at the step that it comes after, 0 before the first."""
