"""A vocabulary for logs of which nothing says what trainer wrote them: names that many would choose."""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

ANY = Vocabulary(
    trainer="unknown",
    signs=(),
    pass_rate=(
        *("eval/pass_rate", "eval/accuracy", "eval/acc", "eval/success_rate"),
        *("eval_pass_rate", "eval_accuracy", "eval_acc", "eval_success_rate"),
        *("val/pass_rate", "val/accuracy", "val/acc", "val_pass_rate", "val_accuracy", "val_acc"),
        *("validation/pass_rate", "validation/accuracy", "test/pass_rate", "test/accuracy", "test/acc"),
        *("test_accuracy", "eval/{set}/pass_rate", "eval/{set}/accuracy", "eval/{set}/acc"),
        *("val/{set}/accuracy", "val/{set}/acc", "pass_rate"),
    ),
    eval_reward=(
        *("eval/reward", "eval/reward_mean", "eval/mean_reward", "eval/score"),
        *("eval_reward", "eval_reward_mean", "eval_mean_reward", "eval_score"),
        *("val/reward", "val/score", "val_reward", "validation/reward", "test/reward", "test_reward"),
        *("eval/{set}/mean@*", "eval/{set}/avg@*", "eval/{set}/reward", "eval/{set}/score"),
        "val/{set}/reward",
    ),
    # A bare accuracy may be of either; that it is held out is not taken for granted.
    train_reward=(
        *("reward", "reward_mean", "mean_reward", "reward/mean", "rewards/mean", "train_reward", "accuracy"),
        *("acc", "success_rate", "score", "scores"),
    ),
    entropy=("entropy", "entropy/mean", "entropy_mean", "mean_entropy", "policy/entropy", "actor/entropy"),
    truncated=("truncated", "truncation_rate", "truncated_rate", "clipped_ratio", "is_truncated/mean"),
    ratio_clipped=("clip_fraction", "clip_frac", "clipfrac", "clip_ratio", "policy/clip_frac"),
    staleness_mean=("staleness_mean", "age_mean", "staleness/mean", "staleness", "off_policy_steps"),
    mean_length=(
        *("mean_length", "response_length", "response_length/mean", "response_length_mean"),
        *("completion_length", "mean_response_length"),
    ),
    kl=("kl", "kl_mean", "policy/kl", "kl_loss"),
    grad_norm=("grad_norm", "gradient_norm", "policy/grad_norm", "actor/grad_norm"),
    loss=("loss", "policy_loss", "policy/loss", "actor/loss"),
    lr=("lr", "learning_rate"),
    # Whether evaluations are in it, nothing says.
    step_seconds=(
        *("step_time", "step_seconds", "time_per_step", "time/step", "timing/step", "timing_s/step"),
        "perf/step_time",
    ),
    devices=("n_gpus", "num_gpus", "n_devices", "num_devices", "world_size"),
    tokens=("tokens_per_step", "step_tokens", "n_tokens"),
    gpu_hours_so_far=("eval/gpu_hours", "gpu_hours", "total_gpu_hours", "gpu_hours_so_far"),
    flops_so_far=("eval/flops", "total_flops", "flops_so_far"),
    tokens_so_far=("total_tokens", "tokens_so_far", "tokens_seen", "num_tokens"),
    # Not n_samples, which is the number of completions of a held-out prompt.
    samples=("samples_per_step",),
    samples_so_far=("total_samples", "samples_so_far", "samples_seen"),
    n_prompts=("eval/n_prompts", "eval_n_prompts", "n_prompts"),
    n_samples=("eval/n_samples", "eval_n_samples", "n_samples"),
    mean_p_1mp=("eval/mean_p_1mp", "eval_mean_p_1mp", "mean_p_1mp"),
    device_sums=("n_gpus", "num_gpus", "n_devices", "num_devices", "world_size"),
)
"""Of every kind the most particular names first."""
