"""prime-rl: the names of its orchestrator (rewards, evaluations, lengths) and of its trainer (entropy, loss).

From prime-rl 0.8.1.dev67 (src/prime_rl/orchestrator/orchestrator.py and metrics.py,
src/prime_rl/trainer/rl/train.py, src/prime_rl/monitors); names of 0.3 to 0.6, which had no agents, come last.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

PRIME_RL = Vocabulary(
    trainer="prime-rl",
    signs=(
        *("train/agg/*", "eval/*/effective/*", "entropy/all/mean", "mismatch_kl/all/mean"),
        *("off_policy/in_queue/mean", "progress/total_rollouts", "progress/total_problems"),
        "reward/all/mean",
    ),
    # pass@k is logged where every reward is 0 or 1, and pass@1 is the pass rate then. avg@k is the mean
    # reward of all rollouts; there is one for every environment and agent. `effective` leaves out rollouts
    # that failed by an error, which count as 0 in `all`. Its console has the mean over all agents.
    pass_rate=("eval/{set}/effective/*pass@1", "eval/{set}/all/*pass@1", "eval/{set}/pass@1"),
    eval_reward=(
        *("eval/{set}/effective/*avg@*", "eval/{set}/all/*avg@*", "eval/{set}/avg@*"),
        "eval/{set}/effective/console/reward/mean",
    ),
    # `agg` is over all environments; `effective` are the rollouts that were trained on.
    train_reward=(
        *("train/agg/effective/*/reward/mean", "train/agg/all/*/reward/mean", "reward/all/mean"),
        "reward/mean",
    ),
    entropy=("entropy/all/mean", "entropy/mean"),
    truncated=("train/agg/effective/*/is_truncated/mean", "is_truncated/all/mean", "is_truncated/mean"),
    # Tokens that the loss leaves out, as the trainer's policy is too far from that of inference.
    ratio_clipped=("is_masked/mean",),
    # By the version at the start of a rollout.
    staleness_mean=("off_policy/mean",),
    mean_length=(
        "train/agg/effective/num_output_tokens/mean",
        "train/agg/effective/*/num_output_tokens/mean",
    ),
    # mismatch_kl is between the policies of the trainer and of inference, not to a reference.
    grad_norm=("optim/grad_norm",),
    loss=("loss/mean",),
    lr=("optim/lr",),
    # Logged twice at every step: by the orchestrator from batch to batch, and by the trainer, its waiting for
    # the batch included. Both cover all of the time. Evaluations share the inference servers with training,
    # which slows it down: their part is in these seconds and cannot be told.
    step_seconds=("time/step",),
    # All that was sampled since the step before, prompts and dropped rollouts included. progress/total_tokens
    # and total_rollouts are left alone, as a step's own are not yet in them.
    tokens=("progress/tokens",),
    samples=("progress/rollouts", "progress/samples"),
    # The config that prime-rl logs itself is that of the orchestrator, which knows of no GPUs. That of the
    # whole run has them, on one node or on several (`RLConfig.deployment`).
    device_sums=(
        "deployment.num_train_gpus + deployment.num_infer_gpus",
        "deployment.num_train_nodes * deployment.gpus_per_node"
        " + deployment.num_infer_nodes * deployment.num_infer_replicas * deployment.gpus_per_node",
    ),
)
"""Values are those of one step. Rewards are in the units of the environment, mostly of [0, 1]."""
