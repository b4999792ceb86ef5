import math

import pytest

from scalerl.ingest.imported import as_run
from scalerl.ingest.logs.log import LogBuilder
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.shares import n_samples
from scalerl.ingest.vocabularies import ANY, BY_TRAINER, ROLES, VOCABULARIES, any_of, tell

# Metrics of one step of every trainer, those of an evaluation included, as its source logs them.
STEPS = {
    "scalerl": """
        train/version train/skipped train/reward_mean train/correct train/groups train/groups_used
        train/completions train/completions_used train/zero_variance train/truncated train/interrupted
        train/mean_length train/loss train/grad_norm train/lr train/entropy train/ratio_mean train/ratio_max
        train/ratio_clipped train/ess train/logp_shift train/multi_version train/kv_staleness_max train/pool
        train/queue_generating train/queue_generated train/queue_verified train/ledger_admitted
        train/ledger_trained train/ledger_zero_variance train/ledger_truncated train/ledger_failed
        train/ledger_in_flight train/restarted compute/device_seconds_generate compute/device_seconds_train
        compute/device_seconds_evaluate compute/device_seconds_idle compute/flops_generate compute/flops_train
        compute/tokens_generated compute/tokens_trained compute/wall_seconds compute/idle_seconds_generate
        compute/idle_seconds_train train/staleness_mean train/staleness_max
        train/staleness_share_over_4 compute/gpu_hours
        compute/flops compute/tokens eval/pass_rate eval/samples eval/prompts eval/version eval/n_prompts
        eval/n_samples eval/mean_p_1mp eval/failed eval/truncated eval/interrupted eval/mean_length
        eval/entropy eval/gpu_hours eval/flops eval/tokens eval/tokens_processed
        forecast/median forecast/ceiling forecast/identified
        forecast/low forecast/high forecast/ceiling_low forecast/ceiling_high health/alarm_length_drift""",
    "trl": """
        loss grad_norm learning_rate epoch num_tokens step_time reward reward_std frac_reward_zero_std kl
        entropy completions/mean_length completions/min_length completions/max_length
        completions/clipped_ratio completions/mean_terminated_length completions/min_terminated_length
        completions/max_terminated_length rewards/accuracy_reward/mean rewards/accuracy_reward/std
        rewards/format_reward/mean rewards/format_reward/std sampling/sampling_logp_difference/mean
        sampling/importance_sampling_ratio/mean clip_ratio/low_mean clip_ratio/high_mean
        clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max eval_loss eval_runtime
        eval_samples_per_second eval_num_tokens eval_reward eval_reward_std eval_entropy eval_kl
        eval_rewards/accuracy_reward/mean eval_rewards/format_reward/mean eval_completions/mean_length
        eval_completions/clipped_ratio eval_clip_ratio/region_mean""",
    "verl": """
        training/global_step training/epoch critic/score/mean critic/score/max critic/score/min
        critic/rewards/mean critic/rewards/max critic/advantages/mean critic/returns/mean response_length/mean
        response_length/max response_length/clip_ratio response_length_non_aborted/mean
        response_length_non_aborted/clip_ratio response/aborted_ratio prompt_length/mean
        prompt_length/clip_ratio num_turns/mean actor/entropy actor/pg_loss actor/entropy_loss actor/kl_loss
        actor/kl_coef actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/grad_norm actor/lr
        perf/mfu/actor perf/total_num_tokens perf/time_per_step perf/throughput timing_s/gen timing_s/step
        timing_s/testing timing_s/update_actor timing_s/save_checkpoint timing_per_token_ms/gen
        training/off_policy/trajectory_staleness/mean training/off_policy/trajectory_staleness/max
        training/off_policy/trajectory_staleness_worst/mean global_seqlen/mean val-core/math_dapo/acc/mean@4
        val-core/math_dapo/acc/best@4/mean val-core/math_dapo/acc/best@4/std val-core/math_dapo/acc/maj@4/mean
        val-aux/math_dapo/acc/best@2/mean val-aux/math_dapo/acc/std@4 val-aux/math_dapo/reward/mean@4
        val-aux/math_dapo/reward/best@4/mean val-aux/num_turns/mean val-core/openai/gsm8k/reward/mean@1""",
    "prime-rl": """
        step train/agg/all/num_output_tokens/mean train/agg/all/has_error/mean train/agg/all/agent/reward/mean
        train/agg/all/agent/solved_all train/agg/all/agent/is_truncated/mean
        train/agg/effective/num_output_tokens/mean train/agg/effective/num_output_tokens/max
        train/agg/effective/agent/num_output_tokens/mean train/agg/effective/agent/reward/mean
        train/agg/effective/agent/reward/max train/agg/effective/agent/rewards/correct/mean
        train/agg/effective/agent/is_truncated/mean
        train/agg/effective/agent/stop_condition/generation_truncated
        train/agg/effective/agent/is_admitted/mean train/math/effective/agent/reward/mean progress/tokens
        progress/input_tokens progress/output_tokens progress/rollouts progress/tasks progress/total_tokens
        progress/total_rollouts time/step time/pack time/wait_for_policy off_policy/mean off_policy/max
        off_policy/in_flight/mean off_policy/in_queue/mean off_policy/dropped batch/math perf/throughput
        perf/mfu optim/lr optim/grad_norm entropy/all/mean entropy/all/std entropy/math/mean
        mismatch_kl/all/mean loss/mean loss/max is_masked/mean kl_ent_ratio/mean time/forward_backward
        eval/aime24/all/agent/avg@8 eval/aime24/effective/agent/avg@8 eval/aime24/effective/agent/pass@1
        eval/aime24/effective/agent/pass@8 eval/aime24/effective/agent/reward/mean
        eval/aime24/effective/agent/is_truncated/mean eval/aime24/effective/num_output_tokens/mean
        eval/aime24/policy_version""",
    "pipeline-rl": """
        actor/reward_mean actor/reward_max actor/reward_min actor/reward_var actor/success_mean
        actor/no_error_mean actor/no_answer_mean actor/overflow_mean actor/overlong_mean actor/num_turns_mean
        actor/prompt_tokens_mean actor/output_tokens_mean actor/output_tokens_max actor/latency_mean
        actor/model_version_mean actor/math_500/success_mean actor/published_samples
        actor/trainer_model_version actor/time_since_start actor/test_reward_mean actor/test_success_mean
        actor/test_overflow_mean actor/test_output_tokens_mean actor/test_latency_mean
        actor/aime_2024/success_mean stats/lr stats/grad_norm stats/samples stats/tokens
        stats/samples_too_old_to_train stats/passes stats/completed_steps stats/epoch stats/min_actor_version
        stats/lag stats/time_waiting_for_data throughput/tokens_perGPU_per_sec throughput/tokens_per_step
        throughput/steps_per_sec throughput/sec_per_step throughput/sec_per_pass rl/loss rl/max_loss rl/reward
        rl/max_reward rl/entropy rl/advantage rl/kl rl/kl_new_old rl/ratio_new_old rl/ratio_new_old_sum
        rl/clamp_log_ratio_ref_new_indicator rl/clamp_log_ratio_new_old_indicator rl/num_output_tokens_sum
        rl/ess""",
    "skyrl": """
        generate/min_num_tokens generate/max_num_tokens generate/avg_num_tokens generate/std_num_tokens
        generate/avg_tokens_non_zero_rewards generate/batch_num_seq generate/batch_padded_seq_len
        reward/avg_pass_at_8 reward/avg_raw_reward reward/mean_positive_reward loss/avg_final_rewards
        loss/avg_raw_advantages loss/avg_raw_advantages_abs policy/final_loss policy/policy_loss
        policy/policy_entropy policy/response_length policy/policy_lr policy/loss_metrics/clip_ratio
        policy/policy_kl policy/grad_norm policy/rollout_train_logprobs_abs_diff_mean trainer/epoch
        trainer/global_step trainer/tokens_per_second_per_gpu timing/step timing/generate timing/policy_train
        timing/eval timing/save_checkpoints timing/eval_generate async/staleness_mean async/staleness_max
        eval/all/avg_score eval/all/pass_at_8 eval/all/mean_positive_reward eval/all/generate/avg_num_tokens
        eval/aime24/avg_score eval/aime24/pass_at_8 eval/aime24/mean_positive_reward""",
    "openrlhf": """
        train/policy_loss train/entropy_loss train/actor_lr train/actor_grad_norm train/ppo_clip_ratio
        train/ppo_kl train/vllm_kl train/kl train/logprobs_diff train/reward train/group_reward_std
        train/return train/response_length train/total_length train/truncated train/rollout/reward_mean
        train/rollout/reward_std train/rollout/response_length_mean train/rollout/truncated_rate
        train/rollout/num_samples train/timing/make_experience train/timing/ppo_train train/timing/broadcast
        train/timing/generation train/timing/step_total train/dynamic_filtering_pass_rate train/global_step
        eval/eval_aime_pass16 eval/eval_aime_pass1 eval/eval_aime_response_length_mean
        eval/eval_aime_truncated_rate eval/eval_response_length_mean eval/eval_truncated_rate
        eval/eval_num_samples eval/global_step""",
    "nemo-rl": """
        train/loss train/grad_norm train/reward train/filtered_reward train/mean_prompt_length
        train/total_num_tokens train/advantages/mean train/baseline_reward/pct_0 train/probs_ratio
        train/probs_ratio_clamped train/kl_penalty train/token_mult_prob_error train/gen_kl_error
        train/policy_kl_error train/sampling_importance_ratio train/num_valid_samples train/approx_entropy
        train/lr train/wd train/global_valid_seqs train/global_valid_toks train/mean_gen_tokens_per_sample
        train/gen_tokens_per_sample/mean train/truncation_rate train/natural_termination_rate
        train/avg_trajectory_age train/buffer_size performance/tokens_per_sec_per_gpu
        timing/train/total_step_time timing/train/generation timing/train/checkpointing
        timing/train/valid_tokens_per_sec_per_gpu timing/validation/total_validation_time validation/accuracy
        validation/avg_length validation/pass_k""",
    "open-instruct": """
        episode global_step training_step epoch val/num_total_tokens val/num_step_tokens lr
        learner_tokens_per_second_overall time/total time/training time/saving time/trainer_waiting_for_data
        time/group_generation_mean scores real_batch_size_ratio unsolved_batch_size_ratio packed_ratio
        val/sequence_lengths val/sequence_lengths_min val/sequence_lengths_max val/stop_rate
        val/advantages_mean val/ratio val/ratio_var batch/filtered_prompts batch/percent_solved_mean
        batch/total_prompts model_step_mean num_steps_off_policy objective/kl0_avg objective/kl1_avg
        objective/kl2_avg objective/kl3_avg loss/kl_avg loss/policy_avg loss/total_avg policy/clipfrac_avg
        policy/entropy_avg optim/grad_norm actor_mfu learner_mfu eval/scores eval/sequence_lengths
        eval/stop_rate eval/pass_at_1 eval/pass_at_8 eval/pass_at_1_unbiased eval/pass_at_8_unbiased
        eval/num_steps_off_policy eval/actor_tokens_per_second""",
    "slime": """
        rollout/raw_reward rollout/rewards rollout/advantages rollout/returns rollout/log_probs
        rollout/ref_log_probs rollout/response_lengths rollout/total_lengths rollout/truncated rollout/step
        rollout/response_len/mean rollout/response_len/max rollout/zero_std/count_1.0 rollout/repetition_frac
        rollout/truncated_ratio perf/rollout_time perf/tokens_per_gpu_per_sec perf/train_wait_time
        perf/train_time perf/actor_train_time perf/step_time perf/wait_time_ratio passrate/pass@1
        passrate/pass@2 multi_turn/raw_response_length/response_length_mean train/loss train/pg_loss
        train/entropy_loss train/pg_clipfrac train/ppo_kl train/kl_loss train/grad_norm train/lr-pg_0
        train/global_batch_size train/step eval/aime eval/aime/response_len/mean eval/aime/truncated_ratio
        eval/aime-truncated_ratio eval/aime-pass@1 eval/aime-pass@2 eval/gpqa eval/step""",
    "areal": """
        ppo_actor/correct_n_seqs ppo_actor/n_seqs ppo_actor/n_tokens ppo_actor/correct_seq_len/avg
        ppo_actor/advantages/avg ppo_actor/kl_rewards/avg ppo_actor/final_reward/avg
        ppo_actor/no_eos_ratios/avg ppo_actor/task_reward/avg ppo_actor/task_reward/max
        ppo_actor/prompt_len/avg ppo_actor/seq_len/avg ppo_actor/eps_clip ppo_actor/update/n_tokens
        ppo_actor/update/importance_weight/avg ppo_actor/update/approx_kl/avg ppo_actor/update/entropy/avg
        ppo_actor/update/actor_loss/avg ppo_actor/update/clip_ratio/avg ppo_actor/update/update_successful
        ppo_actor/update/version_stats/sample_staleness_theta_avg ppo_actor/update/version_stats/v_theta
        ppo_actor/update/grad_norm ppo_actor/update/lr rollout/reward rollout/accepted rollout/rejected
        eval-rollout/reward timeperf/rollout timeperf/recompute_logp timeperf/train_step
        timeperf/update_weights timeperf/eval timeperf/save""",
    "roll": """
        time/step_total time/step_stop_server time/step_model_update time/step_generate time/val_step
        time/step_train time/step_val val_correct/all/mean val_correct/math500/mean system/samples system/tps
        system/actor_infer/tps_gpu token/prompt_length/mean token/response_length/mean
        token/total_response_length/clip critic/entropy/mean critic/correct/mean critic/score/mean
        critic/score/max critic/rewards/mean critic/advantages/mean critic/returns/mean critic/kl
        critic/kl_coef math_rule/critic/score/mean actor/ppo_ratio_high_clipfrac actor/ppo_ratio_clipfrac
        actor/clipfrac actor/pg_loss actor/kl_loss actor/total_loss actor/approxkl actor/lr
        val/score/mean val/score/max val/SimpleSokoban/score/mean val/env/SimpleSokoban/success
        rollout/score/mean rollout/response_length/mean tokens/response_length/mean""",
    "tinker-cookbook": """
        step progress/batch progress/done_frac optim/lr optim/entropy optim/kl_sample_train_v1
        optim/kl_sample_train_v2 kl_policy_base env/all/ac_tokens_per_turn env/all/turns_per_episode
        env/all/total_episodes env/all/total_turns env/all/total_ac_tokens env/all/total_ob_tokens
        env/all/reward/total env/all/format env/all/correct env/all/by_group/frac_mixed
        env/all/by_group/frac_all_good env/all/by_group/frac_all_bad test/env/all/total_episodes
        test/env/all/total_ac_tokens test/env/all/reward/total test/env/all/format test/env/all/correct
        test/env/all/by_group/frac_mixed test/env/gsm8k/correct test/env/gsm8k/reward/total
        eval/math500/score eval/math500/num_correct eval/math500/num_examples time/run_evals
        time/sample_async:total time/total""",
    "harness": """
        eval/gsm8k/exact_match,strict-match eval/gsm8k/exact_match_stderr,strict-match
        eval/gsm8k/exact_match,flexible-extract eval/gsm8k/exact_match_stderr,flexible-extract
        eval/gsm8k/n_prompts eval/ifeval/prompt_level_strict_acc,none eval/ifeval/inst_level_strict_acc,none
        eval/mmlu/acc,none eval/mmlu/acc_stderr,none eval/mmlu/acc_norm,none eval/wiki/word_perplexity,none
        eval/aime25|0/pass@k:k=1 eval/aime25|0/pass@k:k=8&n=16 eval/aime25|0/avg@n:n=64
        eval/math_500|0/extractive_match eval/math_500|0/extractive_match_stderr""",
}

# What each role is of them, the most fitting first; roles that are not here have none.
ROLES_OF = {
    "scalerl": {
        "pass_rate": "eval/pass_rate",
        "train_reward": "train/reward_mean",
        "entropy": "train/entropy",
        "truncated": "train/truncated",
        "ratio_clipped": "train/ratio_clipped",
        "staleness_mean": "train/staleness_mean",
        "mean_length": "train/mean_length",
        "grad_norm": "train/grad_norm",
        "loss": "train/loss",
        "lr": "train/lr",
        "samples_so_far": "eval/samples",
        "gpu_hours_so_far": "eval/gpu_hours",
        "flops_so_far": "eval/flops",
        "tokens_so_far": "eval/tokens",
        "tokens_processed_so_far": "eval/tokens_processed",
        "n_prompts": "eval/n_prompts",
        "n_samples": "eval/n_samples",
        "mean_p_1mp": "eval/mean_p_1mp",
    },
    "trl": {
        "eval_reward": "eval_reward",
        "reward_parts": "eval_rewards/accuracy_reward/mean eval_rewards/format_reward/mean",
        "train_reward": "rewards/accuracy_reward/mean reward rewards/format_reward/mean",
        "entropy": "entropy",
        "truncated": "completions/clipped_ratio",
        "ratio_clipped": "clip_ratio/region_mean",
        "mean_length": "completions/mean_length",
        "kl": "kl",
        "grad_norm": "grad_norm",
        "loss": "loss",
        "lr": "learning_rate",
        "step_seconds": "step_time",
        "tokens_so_far": "num_tokens",
    },
    "verl": {
        "pass_rate": "val-core/math_dapo/acc/mean@4",
        "eval_reward": "val-core/openai/gsm8k/reward/mean@1 val-aux/math_dapo/reward/mean@4",
        "train_reward": "critic/score/mean critic/rewards/mean",
        "entropy": "actor/entropy actor/entropy_loss",
        "truncated": "response_length/clip_ratio",
        "ratio_clipped": "actor/pg_clipfrac",
        "staleness_mean": "training/off_policy/trajectory_staleness/mean",
        "mean_length": "response_length/mean",
        "kl": "actor/kl_loss",
        "grad_norm": "actor/grad_norm",
        "loss": "actor/pg_loss",
        "lr": "actor/lr",
        "step_seconds": "timing_s/step perf/time_per_step",
        "tokens": "perf/total_num_tokens",
    },
    "prime-rl": {
        "pass_rate": "eval/aime24/effective/agent/pass@1",
        "eval_reward": "eval/aime24/effective/agent/avg@8 eval/aime24/all/agent/avg@8",
        "train_reward": "train/agg/effective/agent/reward/mean train/agg/all/agent/reward/mean",
        "entropy": "entropy/all/mean",
        "truncated": "train/agg/effective/agent/is_truncated/mean",
        "ratio_clipped": "is_masked/mean",
        "staleness_mean": "off_policy/mean",
        "mean_length": """
            train/agg/effective/num_output_tokens/mean train/agg/effective/agent/num_output_tokens/mean""",
        "grad_norm": "optim/grad_norm",
        "loss": "loss/mean",
        "lr": "optim/lr",
        "step_seconds": "time/step",
        "tokens": "progress/tokens",
        "samples": "progress/rollouts",
    },
    "pipeline-rl": {
        "pass_rate": "actor/test_success_mean",
        "eval_reward": "actor/test_reward_mean",
        "train_reward": "actor/success_mean actor/reward_mean rl/reward",
        "entropy": "rl/entropy",
        "truncated": "actor/overflow_mean",
        "ratio_clipped": "rl/clamp_log_ratio_new_old_indicator",
        "mean_length": "actor/output_tokens_mean",
        "kl": "rl/kl",
        "grad_norm": "stats/grad_norm",
        "loss": "rl/loss",
        "lr": "stats/lr",
        "step_seconds": "throughput/sec_per_step",
        "tokens": "throughput/tokens_per_step",
        "tokens_so_far": "stats/tokens",
        "samples_so_far": "stats/samples actor/trainer_model_version",
    },
    "skyrl": {
        "eval_reward": "eval/all/avg_score eval/aime24/avg_score eval/all/mean_positive_reward",
        "train_reward": "reward/avg_raw_reward loss/avg_final_rewards",
        "entropy": "policy/policy_entropy",
        "ratio_clipped": "policy/loss_metrics/clip_ratio",
        "staleness_mean": "async/staleness_mean",
        "mean_length": "generate/avg_num_tokens",
        "kl": "policy/policy_kl",
        "grad_norm": "policy/grad_norm",
        "loss": "policy/policy_loss",
        "lr": "policy/policy_lr",
        "step_seconds": "timing/step",
        "samples": "generate/batch_num_seq",
    },
    "openrlhf": {
        "eval_reward": "eval/eval_aime_pass1",
        "train_reward": "train/rollout/reward_mean train/reward",
        "entropy": "train/entropy_loss",
        "truncated": "train/rollout/truncated_rate train/truncated",
        "ratio_clipped": "train/ppo_clip_ratio",
        "mean_length": "train/rollout/response_length_mean train/response_length",
        "kl": "train/kl",
        "grad_norm": "train/actor_grad_norm",
        "loss": "train/policy_loss",
        "lr": "train/actor_lr",
        "step_seconds": "train/timing/step_total",
        "samples": "train/rollout/num_samples",
    },
    "nemo-rl": {
        "eval_reward": "validation/accuracy",
        "train_reward": "train/reward",
        "entropy": "train/approx_entropy",
        "truncated": "train/truncation_rate",
        "staleness_mean": "train/avg_trajectory_age",
        "mean_length": "train/mean_gen_tokens_per_sample train/gen_tokens_per_sample/mean",
        "kl": "train/kl_penalty",
        "grad_norm": "train/grad_norm",
        "loss": "train/loss",
        "lr": "train/lr",
        "step_seconds": "timing/train/total_step_time",
        "evaluation_seconds": "timing/validation/total_validation_time",
        "tokens": "train/total_num_tokens",
    },
    "open-instruct": {
        "pass_rate": "eval/pass_at_1",
        "eval_reward": "eval/scores",
        "train_reward": "batch/percent_solved_mean scores",
        "entropy": "policy/entropy_avg",
        "finished": "val/stop_rate",
        "ratio_clipped": "policy/clipfrac_avg",
        "staleness_mean": "num_steps_off_policy",
        "mean_length": "val/sequence_lengths",
        "kl": "objective/kl2_avg",
        "grad_norm": "optim/grad_norm",
        "loss": "loss/total_avg",
        "lr": "lr",
        "step_seconds": "time/total",
        "tokens": "val/num_step_tokens",
        "samples_so_far": "episode",
    },
    "slime": {
        "pass_rate": "eval/aime-pass@1",
        "eval_reward": "eval/aime eval/gpqa",
        "train_reward": "passrate/pass@1 rollout/raw_reward",
        "entropy": "train/entropy_loss",
        "truncated": "rollout/truncated_ratio rollout/truncated",
        "ratio_clipped": "train/pg_clipfrac",
        "mean_length": "rollout/response_len/mean rollout/response_lengths",
        "kl": "train/kl_loss",
        "grad_norm": "train/grad_norm",
        "loss": "train/pg_loss",
        "lr": "train/lr-pg_0",
        "row_seconds": "perf/step_time",
    },
    "areal": {
        "eval_reward": "eval-rollout/reward",
        "train_reward": "rollout/reward ppo_actor/task_reward/avg",
        "entropy": "ppo_actor/update/entropy/avg",
        "truncated": "ppo_actor/no_eos_ratios/avg",
        "ratio_clipped": "ppo_actor/update/clip_ratio/avg",
        "staleness_mean": "ppo_actor/update/version_stats/sample_staleness_theta_avg",
        "grad_norm": "ppo_actor/update/grad_norm",
        "loss": "ppo_actor/update/actor_loss/avg",
        "lr": "ppo_actor/update/lr",
        "samples": "ppo_actor/n_seqs",
    },
    "roll": {
        "pass_rate": "val_correct/all/mean val_correct/math500/mean val/env/SimpleSokoban/success",
        "eval_reward": "val/score/mean val/SimpleSokoban/score/mean",
        "train_reward": "critic/correct/mean critic/score/mean critic/rewards/mean",
        "entropy": "critic/entropy/mean",
        "ratio_clipped": "actor/ppo_ratio_clipfrac",
        "mean_length": "token/response_length/mean tokens/response_length/mean",
        "kl": "critic/kl actor/kl_loss",
        "loss": "actor/pg_loss",
        "lr": "actor/lr",
        "step_seconds": "time/step_total",
        "evaluation_seconds": "time/val_step",
    },
    "tinker-cookbook": {
        "pass_rate": "test/env/all/correct test/env/gsm8k/correct",
        "eval_reward": "test/env/all/reward/total test/env/gsm8k/reward/total eval/math500/score",
        "train_reward": "env/all/correct env/all/reward/total",
        "entropy": "optim/entropy",
        "kl": "kl_policy_base",
        "lr": "optim/lr",
        "tokens": "env/all/total_ac_tokens",
        "samples": "env/all/total_episodes",
    },
    "harness": {
        "pass_rate": "eval/gsm8k/exact_match,strict-match eval/gsm8k/exact_match,flexible-extract "
        "eval/ifeval/prompt_level_strict_acc,none eval/mmlu/acc,none eval/math_500|0/extractive_match "
        "eval/aime25|0/avg@n:n=64 eval/aime25|0/pass@k:k=1",
        "n_prompts": "eval/gsm8k/n_prompts",
    },
}


def test_every_trainer_is_tested():
    assert list(BY_TRAINER) == [*STEPS, ANY.trainer]
    assert VOCABULARIES[-1] is ANY


@pytest.mark.parametrize("trainer", STEPS)
def test_what_the_roles_are(trainer):
    names = STEPS[trainer].split()
    assert len(set(names)) == len(names)
    found = {role: BY_TRAINER[trainer].matches(role, names) for role in ROLES}
    expected = {role: text.split() for role, text in ROLES_OF[trainer].items()}
    assert {role: matches for role, matches in found.items() if matches} == expected


@pytest.mark.parametrize("trainer", STEPS)
def test_the_trainer_is_told(trainer):
    names = STEPS[trainer].split()
    around = ["_step", "_timestamp", "_runtime", "epoch", "step", "time", "global_step", "system/gpu.0.gpu"]
    for mixed in (names, names[::-1], around + names, [f"train/{name}" for name in names]):
        told = tell(mixed)
        assert told is not None
        assert told.trainer == trainer


@pytest.mark.parametrize("trainer", STEPS)
def test_names_that_are_needed_are_known(trainer):
    pattern = any_of(name for one in VOCABULARIES for name in one.patterns())
    for text in ROLES_OF[trainer].values():
        assert all(pattern.fullmatch(name) for name in text.split())


def test_nothing_tells_a_trainer():
    told = tell(["loss", "reward", "entropy", "eval/accuracy", "validation/accuracy", "lr", "epoch"])
    assert told is None


def test_trl_by_way_of_a_tracker():
    # Trackers of the Trainer make `eval/` of `eval_`, and put `train/` before all others.
    names = STEPS["trl"].split()
    names = [f"eval/{n.removeprefix('eval_')}" if n.startswith("eval_") else f"train/{n}" for n in names]
    told = tell(names)
    assert told is not None
    assert told.trainer == "trl"
    assert told.matches("eval_reward", names) == ["eval/reward"]
    parts = told.matches("reward_parts", names)
    assert parts == ["eval/rewards/accuracy_reward/mean", "eval/rewards/format_reward/mean"]
    assert told.matches("train_reward", names)[:2] == ["train/rewards/accuracy_reward/mean", "train/reward"]
    # Those of an evaluation are not taken for those of a step.
    assert told.matches("entropy", names) == ["train/entropy"]
    assert told.matches("truncated", names) == ["train/completions/clipped_ratio"]
    assert told.matches("tokens_so_far", names) == ["train/num_tokens"]


BEST_OF_SEVERAL = """
    val-core/aime/acc/best@8/mean val-core/aime/acc/maj@8/mean val-core/aime/acc/worst@8/mean
    val-aux/aime/acc/best@2/mean val-aux/aime/acc/maj@2/mean eval/aime/effective/agent/pass@8
    eval/aime/effective/agent/pass^8 eval/aime/pass@8 eval/pass@8 eval/aime/best@8 eval/aime/maj@8
    eval/all/pass_at_8 eval/aime/pass_at_8 eval/pass_at_8 eval/pass_at_8_unbiased eval/eval_aime_pass8
    eval/eval_aime_pass16 eval_aime_pass16 validation/pass_k reward/avg_pass_at_8"""


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=lambda vocabulary: vocabulary.trainer)
@pytest.mark.parametrize("name", BEST_OF_SEVERAL.split())
def test_best_of_several_is_no_pass_rate(vocabulary, name):
    for there in (name, f"train/{name}"):
        for role in ("pass_rate", "eval_reward", "reward_parts", "train_reward"):
            assert vocabulary.matches(role, [there]) == []


def test_a_vocabulary_names_nothing_twice():
    for vocabulary in VOCABULARIES:
        for role in ("signs", *ROLES):
            names = getattr(vocabulary, role)
            assert len(set(names)) == len(names), (vocabulary.trainer, role)


def test_unknown_trainers():
    names = [
        "eval/math/accuracy",
        "eval_accuracy",
        "reward",
        "train/entropy",
        "step_time",
        "total_tokens",
        "lr",
    ]
    assert ANY.matches("pass_rate", names) == ["eval_accuracy", "eval/math/accuracy"]
    assert ANY.matches("train_reward", names) == ["reward"]
    assert ANY.matches("entropy", names) == ["train/entropy"]
    assert ANY.matches("step_seconds", names) == ["step_time"]
    assert ANY.matches("tokens_so_far", names) == ["total_tokens"]
    assert ANY.signs == ()


def test_completions_of_a_held_out_prompt_are_not_those_of_a_step():
    builder = LogBuilder("log", "test", "run", lambda name: True)
    noise = {"n_prompts": 100, "n_samples": 16, "mean_p_1mp": 0.04}
    for step in range(0, 30, 10):
        builder.add(step, math.nan, {"eval/pass_rate": 0.1 + 0.01 * step, "seconds": 1, **noise})
    point = as_run(builder.build(), ANY, ReadOptions()).evals[-1]
    assert math.isnan(point.samples)
    assert (point.n_prompts, point.n_samples, point.mean_p_1mp) == (100, 16, 0.04)


def test_a_share_that_a_trainer_calls_percent_is_not_divided_by_100():
    builder = LogBuilder("log", "test", "run", lambda name: True)
    for step in range(1, 9):
        solved = {"batch/percent_solved_mean": 0.3 + step / 20, "val/stop_rate": 0.9}
        builder.add(step, math.nan, solved)
    vocabulary = BY_TRAINER["open-instruct"]
    run = as_run(builder.build(), vocabulary, ReadOptions(metric="batch/percent_solved_mean"))
    assert [one.pass_rate for one in run.evals] == pytest.approx([0.3 + n / 20 for n in range(1, 9)])
    assert not any("divided" in warning for warning in run.warnings)


def test_versions_of_before():
    cases = {
        "trl": (
            ["reward", "reward_std", "completion_length", "kl", "clip_ratio"],
            "mean_length",
            "completion_length",
        ),
        "prime-rl": (
            ["eval/aime/avg@16", "reward/all/mean", "entropy/all/mean"],
            "eval_reward",
            "eval/aime/avg@16",
        ),
        "skyrl": (
            ["policy/ppo_clip_ratio", "reward/avg_raw_reward"],
            "ratio_clipped",
            "policy/ppo_clip_ratio",
        ),
    }
    for trainer, (names, role, expected) in cases.items():
        told = tell(names)
        assert told is not None
        assert told.trainer == trainer
        assert told.matches(role, names) == [expected]


def test_names_as_mlflow_has_them():
    names = [name.replace("@", "_at_") for name in STEPS["verl"].split()]
    told = tell(names)
    assert told is not None
    assert told.trainer == "verl"
    for role in ("pass_rate", "eval_reward"):
        assert told.matches(role, names) == [n.replace("@", "_at_") for n in ROLES_OF["verl"][role].split()]
    assert n_samples("val-core/aime_at_home/acc/mean_at_32") == 32
    best = [name.replace("@", "_at_") for name in BEST_OF_SEVERAL.split()]
    assert told.matches("pass_rate", best) == told.matches("eval_reward", best) == []
