"""slime: the names that its rollout manager (evaluations, lengths) and its trainer (rewards, losses) log.

From the main branch of August 2026, after 0.3.1: slime/observability/rollout_metrics.py and
train_metric_utils.py, slime/backends/megatron_utils/model.py and loss.py; names of 0.1 and 0.2 come last.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

SLIME = Vocabulary(
    trainer="slime",
    signs=(
        *("rollout/raw_reward", "rollout/response_lengths", "rollout/total_lengths"),
        *("perf/rollout_time", "perf/train_wait_time", "perf/actor_train_time", "eval/*-truncated_ratio"),
        *("train/pg_clipfrac", "train/lr-pg_0", "train/train_rollout_logprob_abs_diff"),
    ),
    # The mean reward of an evaluation set, whatever it is. pass@1, with --log-passrate, is the share of
    # completions with a reward of 1; of other k it is no pass rate.
    pass_rate=("eval/{set}-pass@1",),
    eval_reward=("eval/<set>",),
    # `rewards` are less the mean of their group. passrate/pass@1 is the share with a reward of 1.
    train_reward=("passrate/pass@1", "rollout/raw_reward"),
    # The mean entropy, with no sign or weight.
    entropy=("train/entropy_loss",),
    truncated=("rollout/truncated_ratio", "rollout/truncated"),
    ratio_clipped=("train/pg_clipfrac",),
    mean_length=("rollout/response_len/mean", "rollout/response_lengths"),
    # To the reference model. `ppo_kl` is that of a step to its start.
    kl=("train/kl_loss",),
    grad_norm=("train/grad_norm",),
    loss=("train/pg_loss",),
    lr=("train/lr-pg_0",),
    # Of the trainer, from the end of its training on a rollout to the end of the next: generation, weight
    # sync and evaluations are in its waiting.
    step_seconds=("perf/step_time",),
    # Whether rollouts have GPUs of their own is a switch (`colocate`): no product is their number.
    sample_sums=("rollout_batch_size * n_samples_per_prompt",),
)
"""Values are those of one rollout, and of the last update on it for losses. Rollouts count from 0."""
