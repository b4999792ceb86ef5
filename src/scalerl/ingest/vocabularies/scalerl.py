"""scalerl: the names under which its own trainer logs to trackers (docs/howto/trackers.md)."""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

SCALERL = Vocabulary(
    trainer="scalerl",
    signs=("eval/mean_p_1mp", "eval/gpu_hours", "train/kv_staleness_max"),
    pass_rate=("eval/pass_rate",),
    train_reward=("train/reward_mean",),
    entropy=("train/entropy",),
    truncated=("train/truncated",),
    ratio_clipped=("train/ratio_clipped",),
    staleness_mean=("train/staleness_mean",),
    mean_length=("train/mean_length",),
    kl=("train/kl",),
    grad_norm=("train/grad_norm",),
    loss=("train/loss",),
    lr=("train/lr",),
    # Those of the evaluations themselves: they were asked for at that compute, wherever they end.
    samples_so_far=("eval/samples",),
    gpu_hours_so_far=("eval/gpu_hours",),
    flops_so_far=("eval/flops",),
    tokens_so_far=("eval/tokens",),
    tokens_processed_so_far=("eval/tokens_processed",),
    n_prompts=("eval/n_prompts",),
    n_samples=("eval/n_samples",),
    mean_p_1mp=("eval/mean_p_1mp",),
)
"""The counters are exact; a tracker that keeps 32 bits rounds them."""
