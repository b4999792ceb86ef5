"""OpenRLHF: the names that its synchronous and asynchronous PPO trainers log.

From OpenRLHF 0.11.0: openrlhf/trainer/ppo_trainer.py, ppo_trainer_async.py, ray/ppo_actor.py and
openrlhf/utils/logging_utils.py, which puts `train/` and `eval/` before the names.
"""

from scalerl.ingest.vocabularies.vocabulary import Vocabulary

OPENRLHF = Vocabulary(
    trainer="openrlhf",
    signs=(
        *("rollout/reward_mean", "rollout/truncated_rate", "rollout/num_samples", "timing/step_total"),
        *("timing/make_experience", "timing/ppo_train", "ppo_clip_ratio", "actor_grad_norm"),
        "eval/eval_*_pass1",
    ),
    # `pass1` is the mean reward of all completions of all prompts of a set, whatever they are, for every set;
    # eval_<set>_pass<n> is that of the best of n.
    eval_reward=("eval/eval_{set}_pass1", "eval_{set}_pass1"),
    # All rollouts of a step; `reward` is of what is left of them after they were filtered and packed.
    train_reward=("rollout/reward_mean", "reward"),
    # The mean entropy, with no sign or weight; logged where actor.entropy_coef is set, be it to 0.
    entropy=("entropy_loss",),
    truncated=("rollout/truncated_rate", "truncated"),
    ratio_clipped=("ppo_clip_ratio",),
    mean_length=("rollout/response_length_mean", "response_length"),
    # To the reference model. `ppo_kl` is that of a step to its start, `vllm_kl` that to the sampler.
    kl=("kl",),
    grad_norm=("actor_grad_norm",),
    loss=("policy_loss",),
    lr=("actor_lr",),
    # The sum of the parts of a step, or, of the asynchronous trainer, from step to step. No evaluations and
    # no checkpoints are in the first; the second begins anew after an evaluation.
    step_seconds=("timing/step_total",),
    # Tokens are logged per completion only (total_length). Completions of one step:
    samples=("rollout/num_samples",),
    # Which roles share GPUs is in switches, for which no product of the config is their number. Of 0.11 the
    # config may be logged as text.
)
"""Values are those of one step. Rewards are what the reward model or function gives, of any range."""
