"""open-instruct: the names that its GRPO logs, both `grpo_fast.py` and the one over OLMo-core.

From the main branch of August 2026, after 0.3.0: open_instruct/grpo_fast.py, grpo_utils.py, data_loader.py,
grpo_callbacks.py and olmo_core_train_modules.py.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

OPEN_INSTRUCT = Vocabulary(
    trainer="open-instruct",
    signs=(
        *("eval/scores", "eval/stop_rate", "val/stop_rate", "val/sequence_lengths", "val/num_step_tokens"),
        *("policy/clipfrac_avg", "batch/percent_solved_mean", "real_batch_size_ratio"),
    ),
    # `pass_at_1` is the mean over prompts of the share of right completions, of [0, 1], unlike pass_at_k for
    # other k. Scores are multiples of `verification_reward`, which is 10 by default: a score of 10 is a pass.
    pass_rate=("eval/pass_at_1",),
    eval_reward=("eval/scores",),
    scaled=(("eval/scores", "verification_reward", 10.0), ("scores", "verification_reward", 10.0)),
    # A share, despite its name: the mean score over the highest possible one. Both are of the prompts that
    # are left after those without any variance were dropped, if they are.
    train_reward=("batch/percent_solved_mean", "scores"),
    shares=("batch/percent_solved_mean",),
    entropy=("policy/entropy_avg",),
    # Share of completions that the sampler ended by themselves.
    finished=("val/stop_rate",),
    ratio_clipped=("policy/clipfrac_avg",),
    # One more than elsewhere: 1 is on-policy, as a step's number is compared with that of the step before.
    staleness_mean=("num_steps_off_policy",),
    mean_length=("val/sequence_lengths",),
    # To the reference policy, by four estimators; 2 is the default of the loss, and loss/kl_avg has its
    # weight in it.
    kl=("objective/kl2_avg",),
    grad_norm=("optim/grad_norm",),
    loss=("loss/total_avg",),
    lr=("lr",),
    # From the start of a step to the end of its training, checkpoint included. Evaluations are sampled beside
    # training, on the same engines, and take no seconds of their own.
    step_seconds=("time/total",),
    # Of one step, prompts and responses. val/num_total_tokens does not have a step's own in it yet.
    tokens=("val/num_step_tokens",),
    # Completions since the start, as the batch size has it.
    samples_so_far=("episode",),
    sample_sums=("num_unique_prompts_rollout * num_samples_per_prompt_rollout",),
    # num_learners_per_node is a list, and the engines have GPUs of their own: no product is their number.
)
"""Values are those of one step. Evaluations are logged some steps after they were begun."""
