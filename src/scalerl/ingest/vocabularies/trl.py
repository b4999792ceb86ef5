"""TRL: the names that `GRPOTrainer`, `RLOOTrainer` and the experimental `AsyncGRPOTrainer` log.

From TRL 1.16 (trainer/grpo_trainer.py, trainer/rloo_trainer.py, experimental/async_grpo) over the Trainer of
Transformers 5.23; names of earlier versions, back to 0.14, come last.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

TRL = Vocabulary(
    trainer="trl",
    signs=(
        "completions/mean_length",
        "completions/clipped_ratio",
        "clip_ratio/region_mean",
        "frac_reward_zero_std",
        "sampling/importance_sampling_ratio/mean",
        "batch/forwarded_tokens_per_step",
        "completion_length",
        "eval_rewards/*/mean",  # all there is where the training begins with an evaluation
    ),
    # The Trainer puts `eval_` before the metrics of an evaluation, and trackers make `eval/` of that.
    # `reward` is the weighted sum of all reward functions, which is no pass rate where one of them looks at
    # the format. Of several evaluation datasets each is logged under the same names.
    eval_reward=("eval_reward", "eval/reward"),
    reward_parts=("eval_rewards/*/mean", "eval/rewards/*/mean"),
    spreads=("eval_rewards/*/std", "eval/rewards/*/std"),
    train_reward=("rewards/accuracy_reward/mean", "reward", "rewards/*/mean"),
    entropy=("entropy",),
    truncated=("completions/clipped_ratio",),
    # Share of tokens outside of the clip range on the side that clips; `clip_ratio` before 0.17.
    ratio_clipped=("clip_ratio/region_mean", "clip_ratio"),
    staleness_mean=("sample/staleness_mean",),
    mean_length=("completions/mean_length", "completion_length"),
    # To the reference model; logged where beta is not 0.
    kl=("kl",),
    grad_norm=("grad_norm",),
    loss=("loss",),
    lr=("learning_rate",),
    # `step_time` is the sampling and the forward and backward passes of one optimizer step; the step of the
    # optimizer, evaluations and checkpoints are not in it. `perf/step_s`, of the asynchronous trainer, goes
    # from the end of a step to the end of the next, evaluations included, which are not logged as seconds
    # that belong to a step.
    step_seconds=("step_time", "perf/step_s"),
    # The asynchronous trainer's: all tokens of the forward passes of a step, prompts included.
    tokens=("batch/forwarded_tokens_per_step",),
    # Since the start, prompts included. A batch counts once, when it is sampled, however often it is used.
    tokens_so_far=("num_tokens",),
    samples=("batch/samples_per_step",),
    # The config has neither the number of processes nor that of completions of a step:
    # `generation_batch_size` is that only if `steps_per_generation` is left alone and `num_iterations` is 1.
)
"""Values are means over `logging_steps` steps, `num_tokens` excepted. Rewards are as the user's functions."""
