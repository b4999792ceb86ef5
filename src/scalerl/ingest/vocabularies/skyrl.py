"""SkyRL: the names that its synchronous and its fully asynchronous trainer log.

From the main branch of August 2026, after skyrl_train 0.4.0: skyrl/train/trainer.py, fully_async_trainer.py,
evaluate.py, generators/utils.py and skyrl/backends/skyrl_train/workers/worker.py. Those of 0.2 and
0.3 come last.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

SKYRL = Vocabulary(
    trainer="skyrl",
    signs=(
        *("eval/all/avg_score", "reward/avg_raw_reward", "reward/mean_positive_reward"),
        *("loss/avg_final_rewards", "policy/policy_entropy", "policy/loss_metrics/clip_ratio"),
        *("generate/avg_num_tokens", "async/staleness_mean"),
    ),
    # The mean of the rewards as they are: of 1 and -1 in the AIME environment, for which the mean of their
    # positive parts is the pass rate. `all` is over all datasets. pass_at_k is no pass rate.
    eval_reward=("eval/all/avg_score", "eval/{set}/avg_score", "eval/all/mean_positive_reward"),
    # loss/avg_final_rewards are less the penalty of the KL.
    train_reward=("reward/avg_raw_reward", "loss/avg_final_rewards"),
    entropy=("policy/policy_entropy",),
    # What share of completions was cut off is not logged.
    ratio_clipped=("policy/loss_metrics/clip_ratio", "policy/ppo_clip_ratio"),
    # By the step at which a group was begun.
    staleness_mean=("async/staleness_mean",),
    mean_length=("generate/avg_num_tokens",),
    kl=("policy/policy_kl", "loss/avg_kl"),
    grad_norm=("policy/grad_norm", "policy/raw_grad_norm"),
    loss=("policy/policy_loss",),
    lr=("policy/policy_lr",),
    # Evaluations come after a step and are not in its seconds. Checkpoints are, in the synchronous trainer.
    step_seconds=("timing/step",),
    # Tokens are logged per second and GPU of training only.
    samples=("generate/batch_num_seq",),
    # Whether inference has GPUs of its own is in trainer.placement.colocate_all: no product is their number.
    sample_sums=("trainer.train_batch_size * generator.n_samples_per_prompt",),
)
"""Values are those of one step. With step-wise trajectories, `batch_num_seq` counts turns."""
