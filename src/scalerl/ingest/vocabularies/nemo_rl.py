"""NeMo RL: the names that its GRPO (synchronous and asynchronous) and PPO log.

From the main branch of August 2026, after 0.7.0: nemo_rl/algorithms/grpo.py,
nemo_rl/algorithms/loss/loss_functions.py and nemo_rl/experience/rollouts.py. `train/` before most names is
NeMo RL's own.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

NEMO_RL = Vocabulary(
    trainer="nemo-rl",
    signs=(
        *("timing/train/total_step_time", "timing/validation/total_validation_time", "token_mult_prob_error"),
        *("gen_kl_error", "global_valid_toks", "mean_gen_tokens_per_sample", "avg_trajectory_age"),
    ),
    # The mean reward of all validation rollouts, be it an accuracy or not. pass_k is no pass rate.
    pass_rate=("validation/accuracy",),
    # After reward scaling and shaping, if the config has any. Before prompts of no variance are dropped,
    # which are not in `filtered_reward`.
    train_reward=("reward",),
    # By the log-probabilities of the sampled tokens.
    entropy=("approx_entropy",),
    # Not 1 - natural_termination_rate: of several turns a rollout may end otherwise.
    truncated=("truncation_rate",),
    # What share of ratios was clipped is not logged: probs_ratio_clamped is a ratio.
    # Of the asynchronous trainer.
    staleness_mean=("avg_trajectory_age",),
    mean_length=("mean_gen_tokens_per_sample", "gen_tokens_per_sample/mean"),
    # To the reference policy, its weight taken out; 0 where that is 0.
    kl=("kl_penalty",),
    grad_norm=("grad_norm",),
    loss=("loss",),
    lr=("lr",),
    # Validation and checkpoints are in the seconds of their step.
    step_seconds=("timing/train/total_step_time",),
    evaluation_seconds=("timing/validation/total_validation_time",),
    # Of one step, prompts and responses; global_valid_toks are the trained ones.
    tokens=("total_num_tokens",),
    # Also where inference has GPUs of its own, which are taken from these.
    device_sums=("cluster.num_nodes * cluster.gpus_per_node",),
    sample_sums=("grpo.num_prompts_per_step * grpo.num_generations_per_prompt",),
)
"""Values are those of one step. A validation before the first one is logged at 0, in no step's seconds."""
