"""Consoles of trainers, printed by copies of the lines that print them; each names its file and version.

A run is a list of `Step`, the first of which is the evaluation before training. A console is a list of parts:
the lines of one step, which a trainer prints without a gap, and the step whose evaluation is in it.
"""

import io
import pprint
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table


@dataclass(frozen=True)
class Step:
    """What is measured at one step; None where it is not."""

    step: int
    held_out: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class Part:
    """Lines that are printed together."""

    text: str
    evaluated: int | None = None
    """The step whose evaluation they hold."""


def run(last: int = 12, every: int = 3, first: int = 0) -> list[Step]:
    """Values of two decimals, all different."""
    before = [Step(0, 0.2)] if not first else []
    return before + [
        Step(n, round(0.2 + 0.03 * n, 2) if n % every == 0 else None, round(0.1 + 0.02 * n, 2))
        for n in range(max(first, 1), last + 1)
    ]


def concat_dict_to_str(values: dict[str, float], step: int, digits: bool) -> str:
    """verl/utils/logger/aggregate_logger.py: 0.9.1, and 0.1 to 0.4 with three decimals."""
    cells = [f"{k}:{pprint.pformat(v) if digits else f'{v:.3f}'}" for k, v in values.items()]
    return " - ".join([f"step:{step}", *cells])


def verl(steps: Sequence[Step]) -> Iterator[Part]:
    """verl 0.9.1: trainer/ppo/ray_trainer.py, `fit`; sets of every kind."""
    for one in steps:
        rates = {"val-core/openai/gsm8k/acc/mean@4": one.held_out, "val-aux/openai/gsm8k/reward/mean@4": 0.5}
        rates = {
            name: value for name, value in rates.items() if one.held_out is not None and value is not None
        }
        if one.reward is None:
            yield Part(f"{concat_dict_to_str(rates, one.step, True)}\n", one.step)
            continue
        row = {"training/global_step": one.step, "critic/score/mean": one.reward, "actor/entropy": 0.3}
        row |= {"timing_s/gen": 5.25, "timing_s/step": 9.5, "perf/total_num_tokens": 4096} | rates
        yield Part(
            concat_dict_to_str(row, one.step, True) + "\n", one.step if one.held_out is not None else None
        )


def verl_of_2024(steps: Sequence[Step]) -> Iterator[Part]:
    """verl 0.1: trainer/ppo/ray_trainer.py, whose first update is step 0 and has the evaluation after it."""
    for one in steps:
        if one.reward is None and one.held_out is not None:
            rate = {"test_score/openai/gsm8k": one.held_out}
            yield Part(f"{concat_dict_to_str(rate, 0, False)}\n", one.step)
            continue
        row = {"timing/gen": 5.25, "critic/kl": 0.001, "critic/score/mean": one.reward, "timing/testing": 2.0}
        if one.held_out is not None:
            row["val/test_score/openai/gsm8k"] = one.held_out
        evaluated = one.step if one.held_out is not None else None
        yield Part(concat_dict_to_str(row, one.step - 1, False) + "\n", evaluated)


def stringify_floats(values: dict[str, Any]) -> dict[str, Any]:
    """SkyRL: skyrl/train/utils/tracking.py, `ConsoleLogger` (August 2026)."""
    return {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in values.items()}


def skyrl(steps: Sequence[Step]) -> Iterator[Part]:
    """SkyRL, August 2026: `ConsoleLogger.log`, by the loguru format of skyrl/train/utils/utils.py."""
    for one in steps:
        row: dict[str, Any] = {}
        if one.reward is not None:
            row |= {"reward/avg_raw_reward": one.reward, "policy/policy_entropy": 0.3, "timing/step": 9.5}
            row |= {"generate/batch_num_seq": 64, "trainer/global_step": one.step}
        if one.held_out is not None:
            row |= {"eval/all/avg_score": one.held_out, "eval/all/pass_at_4": 0.9, "timing/eval": 3.0}
        text = pprint.pformat(stringify_floats(row))
        hour = 18 if not steps[0].step else 19
        stamp = f"\x1b[32m2026-08-21 {hour}:{one.step:02}:38.123\x1b[0m | \x1b[1mINFO    \x1b[0m"
        where = "\x1b[36mskyrl.train.utils.tracking\x1b[0m:\x1b[36mlog\x1b[0m:\x1b[36m189\x1b[0m"
        yield Part(
            f"{stamp} | {where} - \x1b[1mStep {one.step}: \n{text}\x1b[0m\n",
            one.step if one.held_out is not None else None,
        )


def openrlhf(steps: Sequence[Step]) -> Iterator[Part]:
    """OpenRLHF 0.11: trainer/ppo_trainer.py, `fit` and `evaluate`; utils/logging_utils.py."""
    head = "INFO 08-13 19:25:45 ppo_trainer.py:547] ✨ "
    for one in steps:
        if one.reward is not None:
            row = {"policy_loss": -0.01, "reward": one.reward, "rollout/reward_mean": one.reward}
            row |= {"timing/make_experience": 4.5, "timing/ppo_train": 3.0, "timing/step_total": 9.5}
            yield Part(f"{head}Global step {one.step}: {row}\n")
        if one.held_out is not None:
            row = {"eval_math_pass4": 0.9, "eval_math_pass1": one.held_out, "eval_response_length_mean": 80.0}
            yield Part(
                f"{head}Evaluation completed in 0:00:09, global_step {one.step}, eval_metrics: {row}\n",
                one.step,
            )


def openrlhf_async(steps: Sequence[Step]) -> Iterator[Part]:
    """OpenRLHF 0.11: trainer/ppo_trainer_async.py: generator and trainer both print an evaluation."""
    head = "INFO 08-13 19:25:45 ppo_trainer_async.py:244] "
    for one in steps:
        if one.reward is not None:
            row = {"policy_loss": -0.01, "rollout/reward_mean": one.reward, "timing/step_total": 9.5}
            yield Part(f"{head}Global step {one.step}: {row}\n")
        if one.held_out is not None:
            row = {"eval_math_pass1": one.held_out}
            yield Part(
                f"{head}Async evaluation completed: {row}\n{head}Eval at step {one.step}: {row}\n", one.step
            )


def slime(steps: Sequence[Step]) -> Iterator[Part]:
    """slime, August 2026: train.py, observability/*_metrics.py, train_metric_utils.py; two updates a step."""
    head = "[2026-08-21 17:14:19] rollout_metrics.py:247 - "
    for one in steps:
        n = max(one.step - 1, 0)
        if one.reward is not None:
            perf = {
                "rollout/response_len/mean": 120.5,
                "rollout/truncated_ratio": 0.0,
                "perf/rollout_time": 5.0,
            }
            row = {
                "rollout/raw_reward": one.reward,
                "rollout/rewards": 0.0,
                "rollout/response_lengths": 120.5,
            }
            yield Part(f"{head}perf {n}: {perf}\n")
            yield Part(
                f"{head}rollout {n}: {row}\n"
                f"{head}step {2 * n}: { {'train/loss': -0.01, 'train/pg_clipfrac': 0.0} }\n"
                f"{head}step {2 * n + 1}: { {'train/loss': -0.02, 'train/pg_clipfrac': 0.01} }\n"
            )
            yield Part(f"{head}perf {n}: { {'perf/train_wait_time': 6.0, 'perf/step_time': 9.5} }\n")
        if one.held_out is not None:
            row = {"eval/aime": one.held_out, "eval/aime/response_len/mean": 130.5}
            row |= {"eval/aime/truncated_ratio": 0.9, "eval/aime-truncated_ratio": 0.9}
            yield Part(f"{head}eval {n}: {row}\n", one.step)


def nemo_rl(steps: Sequence[Step]) -> Iterator[Part]:
    """NeMo RL, August 2026: algorithms/grpo.py, `grpo_train` and `validate`; epochs of five steps."""
    for one in steps:
        epoch, step = divmod(one.step - 1, 5)
        text = ""
        if one.reward is None:
            text += "\n🔍 Running initial validation...\n"
        elif not step or one is steps[0]:
            text += f"\n{'=' * 25} Epoch {epoch + 1}/9 {'=' * 25}\n"
        if one.reward is not None:
            text += f"\n{'=' * 25} Step {step + 1}/5 {'=' * 25}\n▶ Preparing batch...\n"
        if one.held_out is not None:
            text += f"▶ Starting validation at step {one.step}...\n\n📊 Validation Results:\n"
            text += f"    • Accuracy: {one.held_out:.4f}\n    • Average response length: 120.5 tokens\n"
            text += "    • Samples processed: 64\n\n  ⏱️  Validation Timing:\n"
            text += "    • Total validation time: 3.00s\n"
        if one.reward is not None:
            text += "\n📊 Training Results:\n  • Loss: -0.0100\n  • Generation KL Error: 0.0010\n"
            text += f"  • Avg Reward: {one.reward:.4f}\n  • Mean Generation Length: 120.5000\n"
            text += "\n⏱️  Timing:\n  • Total step time: 9.50s\n  • generation: 5.00s (52.6%)\n"
        yield Part(text, one.step if one.held_out is not None else None)


def prime_rl(steps: Sequence[Step]) -> Iterator[Part]:
    """prime-rl, August 2026: orchestrator/orchestrator.py, trainer/rl/train.py, utils/logger.py."""
    head = "\x1b[2m17:14:19\x1b[0m \x1b[32m\x1b[1mSUCCESS\x1b[0m \x1b[32m\x1b[1m\x1b[22m"
    for one in steps:
        if one.held_out is not None:
            yield Part(
                f"{head}Evaluated aime24 (Step {one.step}) | Policy v{one.step} |   1m 5s | "
                f"Reward {one.held_out:.4f} | Turns 1.0 | Branches 1.0 | Error {0.0:.1%} | "
                f"Truncation {0.25:.1%}\x1b[0m\n",
                one.step,
            )
        if one.reward is not None:
            yield Part(
                f"{head}Step {one.step} |    9.5s | Reward {one.reward:.4f} | "
                f"Trainable 60/64 ({0.938:.1%}) | Turns 1.0 | Branches 1.0 | Max Off-Policy 1 | "
                f"Error {0.0:.1%} | Cancelled {0.0:.1%} | Truncation {0.25:.1%}\n"
                f"\t\t ╰─ math | Ratio {1.0:.1%} | Reward 0.9000\x1b[0m\n"
            )
            yield Part(
                f"{head}Step {one.step} |    9.5s | Loss {-0.01:.4f} | Entropy {0.3:.4f} | "
                f"Mismatch KL {0.001:.4f} | Grad. Norm {0.5:.4f} | LR {1e-6:.2e} | "
                f"Throughput {900:.0f} tokens/s | MFU {12.5:.1f}% | Peak Mem. 20.5 GiB\x1b[0m\n"
            )


def prime_rl_of_2025(steps: Sequence[Step]) -> Iterator[Part]:
    """prime-rl 0.5: orchestrator/orchestrator.py and eval_utils.py, trainer/rl/train.py."""
    head = "17:14:19 SUCCESS "
    for one in steps:
        if one.held_out is not None:
            yield Part(
                f"17:14:10    INFO Running evals for checkpoint step {one.step}\n"
                f"{head}Evaluated aime24 in 9.50s (Avg@4={one.held_out:.4f}, Pass@1: 0.9000, "
                "No-response: 0.0%, Completion Length: 120.50 (±9.00, ∈[1.00, 200.00]), Truncated: 0.0%)\n",
                one.step,
            )
        if one.reward is not None:
            yield Part(
                f"{head}Step {one.step} | Time: 9.50s | Reward: {one.reward:.4f} | Seq. Length: 120.5 "
                "tokens/sample | Async Level: 1 | Max. Off-Policy Level: 1\n"
                f"{head}Step {one.step} | Time: 9.50s | Loss: -0.0100 | Entropy: 0.3000 | LR: 1.00e-06\n"
            )


def format_value(value: Any) -> str:
    """open-instruct: open_instruct/model_utils.py (August 2026)."""
    if isinstance(value, float):
        return f"{value:.2e}" if abs(value) < 1e-5 else f"{value:.2f}"
    return str(value)


def print_rich_single_line_metrics(metrics: dict[str, Any]) -> str:
    """open-instruct: open_instruct/model_utils.py (August 2026); rich's width where there is no terminal."""
    table = Table(show_header=False, box=None)
    table.add_column("Category", style="cyan")
    table.add_column("Values", style="magenta")
    grouped: dict[str, list[tuple[str, Any]]] = {}
    for key, value in metrics.items():
        grouped.setdefault(key.split("/")[0] if "/" in key else "other", []).append((key, value))
    for category in sorted(grouped):
        values = [
            f"{'/'.join(key.split('/')[1:]) if '/' in key else key}: {format_value(value)}"
            for key, value in grouped[category]
        ]
        table.add_row(category, " | ".join(values))
    console = Console(width=80, file=io.StringIO())
    console.print(Panel(table, title="Metrics", expand=False, border_style="bold green"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def open_instruct(steps: Sequence[Step]) -> Iterator[Part]:
    """open-instruct, August 2026: grpo_fast.py, `one_training_step`, and grpo_utils.py, `maybe_evaluate`."""
    for one in steps:
        if one.reward is None:  # nothing is evaluated before the first step
            continue
        row = {"episode": 64 * one.step, "global_step": 64 * one.step, "training_step": one.step}
        row |= {"val/num_step_tokens": 4096, "epoch": 0.1, "learner_tokens_per_second_overall": 812.5}
        row |= {"time/total": 9.5, "scores": one.reward, "policy/entropy_avg": 0.3, "lr": 1e-6}
        row |= {"policy/clipfrac_avg": 0.01, "val/stop_rate": 1.0, "batch/percent_solved_mean": one.reward}
        text = print_rich_single_line_metrics(row)
        if one.held_out is not None:
            rates = {"eval/scores": 10 * one.held_out, "eval/sequence_lengths": 120.5, "eval/stop_rate": 1.0}
            rates |= {"eval/pass_at_1": one.held_out, "eval/actor_tokens_per_second": 1234.5}
            text += print_rich_single_line_metrics(rates)
        yield Part(text, one.step if one.held_out is not None else None)


def trl(steps: Sequence[Step], callback: str = "ProgressCallback") -> list[Part]:
    """The Trainer's own callbacks (Transformers 5.23), called as the Trainer calls them."""
    from transformers import trainer_callback
    from transformers.trainer_callback import TrainerControl, TrainerState

    printer = getattr(trainer_callback, callback)()
    state = TrainerState(max_steps=max(one.step for one in steps), is_world_process_zero=True)
    common = (None, state, TrainerControl())
    stream, parts, done = io.StringIO(), [], 0
    with redirect_stdout(stream), redirect_stderr(stream):
        printer.on_train_begin(*common)
        for one in steps:
            state.global_step, state.epoch = one.step, one.step / 7
            if one.reward is not None:
                printer.on_step_end(*common)
                row = {"loss": 1e-9, "reward": one.reward, "completions/mean_length": 9.5}
                row |= {"num_tokens": 4096.0 * one.step, "entropy": 0.3, "epoch": state.epoch}
                printer.on_log(*common, logs=row)
            if one.held_out is not None:
                for _ in range(2):
                    printer.on_prediction_step(*common, eval_dataloader=range(2))
                row = {"eval_loss": 0.0, "eval_reward": one.held_out, "epoch": state.epoch}
                printer.on_log(*common, logs=row)
                printer.on_evaluate(*common)
            text = stream.getvalue()
            parts.append(Part(text[done:], one.step if one.held_out is not None else None))
            done = len(text)
        printer.on_log(*common, logs={"train_runtime": 9.5, "train_loss": 0.1, "epoch": 1.0})
        printer.on_train_end(*common)
    return [*parts, Part(stream.getvalue()[done:])]


CONSOLES: dict[str, tuple[Callable[[Sequence[Step]], Iterator[Part]], str, str]] = {
    "verl": (verl, "verl", "val-core/openai/gsm8k/acc/mean@4"),
    "verl-2024": (verl_of_2024, "verl", "val/test_score/openai/gsm8k"),
    "skyrl": (skyrl, "skyrl", "eval/all/avg_score"),
    "openrlhf": (openrlhf, "openrlhf", "eval_math_pass1"),
    "openrlhf-async": (openrlhf_async, "openrlhf", "eval_math_pass1"),
    "slime": (slime, "slime", "eval/aime"),
    "nemo-rl": (nemo_rl, "nemo-rl", "validation/accuracy"),
    "prime-rl": (prime_rl, "prime-rl", "eval/aime24/effective/console/reward/mean"),
    "prime-rl-2025": (prime_rl_of_2025, "prime-rl", "eval/aime24/avg@4"),
    "open-instruct": (open_instruct, "open-instruct", "eval/pass_at_1"),
}
"""By name: the writer, the trainer, and the metric of the evaluations; TRL's writer needs its library."""

PREFIX = "\x1b[36m(TaskRunner pid=71, ip=10.0.0.7)\x1b[0m "
NOISE = (
    "\x1b[36m(WorkerDict pid=72)\x1b[0m INFO 08-13 19:25:45 model_runner.py:92] graphs {'size': 3}\n",
    "\rTraining Progress:  10%|█         | 5/50 [00:09<01:21,  1.8s/it]\n",
    "\x1b[36m(WorkerDict pid=73)\x1b[0m WARNING: step: 5 of something: {'a': \n",
    "\0\0NCCL INFO Channel 00/02 :    0   1\n",
    "(autoscaler +2m3s) Tip: use `ray status`\n",
    "\x1b[36m(WorkerDict pid=72)\x1b[0m {'max_tokens': 3} [repeated 7x across cluster]\n",
)
"""Lines of other processes."""


def plain(parts: Sequence[Part]) -> str:
    """The console as one process prints it."""
    return "".join(part.text for part in parts)


def by_ray(parts: Sequence[Part]) -> str:
    """The same as the driver of Ray prints it, with lines of other processes between those of a row."""
    lines = plain(parts).splitlines(keepends=True)
    return "".join(f"{PREFIX}{line}{NOISE[n % len(NOISE)]}" for n, line in enumerate(lines))
