"""End to end against TRL: one base model, task, batch, context, learning rate, loss and number of cores.

    python -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0      # first and alone: a CPU build
    trl-venv/bin/pip install trl==1.16.0 accelerate==1.15.0 transformers==5.23.0 datasets pydantic
    python benchmarks/train.py --trl-python trl-venv/bin/python --repeat 3

Trains chains of up to 10 operations on two cores, by TRL's GRPOTrainer and by scalerl with the placements
`local` (generator and trainer on a core each) and `inline` (one core), each in processes of its own, in turn;
`local-transformers` is `local` without the fused passes.
Prints trained completions per second after a warm-up, and the time of training to a pass rate of 0.70.

Both sides: 16 prompts x 16 completions a step, at most 26 new tokens, no KL, CISPO with its ratio capped at
5, advantages over the batch std, truncated completions left out of the loss, temperature 1, AdamW with a
warm-up to a constant rate, float32; nothing is evaluated, logged or saved on the way. scalerl is PipelineRL
with k = 8, and otherwise the recipe `scalerl` without interruptions; TRL is on-policy, as it is made. A
completion counts as trained when a step has consumed it, also where its group had no signal. The clock starts
when all is loaded. TRL runs in two data-parallel processes of one thread, with a static KV cache: that did
best (`--processes 1 --threads 2`, `--threads 1`, `--cache dynamic` and `--micro 64` are the others tried).
Every few steps the weights are copied, off the clock, and evaluated when all is done, those of every side by
the same evaluator on the same held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

WARMUP_STEPS = 10
TARGET = 0.70
BATCH, SAMPLES = 16, 16
PLAIN = "-transformers"
"""Suffix of a side of ours that runs on transformers' own modules, as it is given no C compiler."""
EVALUATED = 2
"""Completions per held-out prompt."""


def make_recipe(lr: float, steps: int, placement: str, seed: int = 0) -> Any:
    """Return the recipe of scalerl's side, from which TRL's side takes its numbers."""
    from scalerl.rl.config.recipe import from_dict

    return from_dict(
        {
            "model": "chain-base",
            "seed": seed,
            "task": {"kind": "chain", "k_max": 10},
            "budget": {"kind": "steps", "amount": steps},
            "decode_slots": 1024,
            "batch": {"prompts": BATCH, "samples": SAMPLES, "micro": 256},
            "context": {"prompt": 22, "thinking": 20, "answer": 6},
            "length": {"kind": "none"},
            "optimiser": {"kind": "adamw", "lr": lr, "warmup_steps": 10},
            "evaluation": {"samples": EVALUATED},
            "placement": {"kind": placement},
        }
    )


@dataclass
class Clock:
    """Training time, and copies of the weights along the way."""

    folder: Path
    every: int
    step: int = 0
    seconds: float = 0.0
    warm: float = 0.0
    copies: dict[int, tuple[float, Mapping[str, np.ndarray]]] = field(default_factory=dict)
    """Time in seconds and weights, by step."""
    _since: float = 0.0

    def start(self) -> None:
        """Start the clock, or continue after a pause."""
        self._since = time.perf_counter()

    def tick(self, copy_weights: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Count a step as done, and copy the weights off the clock if it is time."""
        self.seconds += time.perf_counter() - self._since
        self.step += 1
        if self.step == WARMUP_STEPS:
            self.warm = self.seconds
        if self.step % self.every == 0:
            self.copies[self.step] = self.seconds, copy_weights()
        self.start()

    def write(self) -> None:
        """Write the files that `time_to_target` reads."""
        rate = (self.step - WARMUP_STEPS) * BATCH * SAMPLES / (self.seconds - self.warm)
        times = {step: seconds for step, (seconds, _) in self.copies.items()}
        (self.folder / "clock.json").write_text(json.dumps({"rate": rate, "seconds": times}))
        for step, (_, weights) in self.copies.items():
            np.savez(self.folder / f"{step}.npz", allow_pickle=False, **weights)


def run_scalerl(args: argparse.Namespace, clock: Clock) -> None:
    """Run our side: all that `scalerl.rl.train.train` does, step records included, but no evaluations."""
    import torch

    from scalerl.record.writer import RunWriter
    from scalerl.rl.learner.load import load_learner
    from scalerl.rl.loop.counters import RunCounters, groups_row, step_row
    from scalerl.rl.loop.parts import place_generator
    from scalerl.rl.loop.pipeline import Pipeline
    from scalerl.rl.loop.prompt_pool import PromptPool
    from scalerl.rl.model.causal_lm import load_tokenizer
    from scalerl.rl.verify.verifier import load_verifier

    torch.set_num_threads(1)
    recipe = make_recipe(args.lr, args.steps, args.side.removesuffix(PLAIN), args.seed)
    learner = load_learner(recipe, args.model)
    generator = place_generator(recipe, args.model, learner)
    verifier = load_verifier(recipe, load_tokenizer(args.model))
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    pipeline = Pipeline(recipe, pool, generator, learner, verifier.start)
    writer, counters = RunWriter(clock.folder / "run", {"name": "race"}), RunCounters()
    try:
        while generator.installed < 0:  # until its process has started
            time.sleep(0.1)
        clock.start()
        for step in pipeline.steps():
            counters.add(step, generator.counters, 0.0)
            writer.step(step_row(step, counters, pipeline), groups_row(step))
            clock.tick(lambda: {name: w.numpy().copy() for name, w in learner.weights()})
            if clock.step >= args.steps:
                break
    finally:
        generator.close()
        writer.close()


def run_trl(args: argparse.Namespace, clock: Clock) -> None:
    """Run TRL's side."""
    import logging

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from scalerl.rl.types import Prompt

    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    recipe = make_recipe(args.lr, args.steps, "inline")
    task, optimiser = recipe.task, recipe.optimiser
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="sdpa", dtype=torch.float32)
    prompts = task.prompts("train")
    rows = [{"prompt": p.text, "answer": p.answer} for p in prompts]
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    def reward(prompts: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float | None]:
        # Drop the end token, which a task's verifier never sees.
        texts = [text.removesuffix(tokenizer.eos_token) for text in tokenizer.batch_decode(completion_ids)]
        return [task.verify(Prompt("", "", a), text).value for text, a in zip(texts, answer, strict=True)]

    class Tick(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if int(os.environ.get("RANK", "0")) == 0:
                clock.tick(lambda: {n: p.detach().numpy().copy() for n, p in model.named_parameters()})

    config = GRPOConfig(
        output_dir=str(clock.folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.micro // processes,
        gradient_accumulation_steps=BATCH * SAMPLES // args.micro,
        num_generations=SAMPLES,
        num_iterations=1,
        max_completion_length=recipe.context.sampled,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        cache_implementation=None if args.cache == "dynamic" else args.cache,
        beta=0.0,
        loss_type="cispo",
        epsilon_high=recipe.loss.max_ratio,
        scale_rewards="batch",
        mask_truncated_completions=True,
        learning_rate=optimiser.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimiser.warmup_steps,
        adam_beta1=optimiser.betas[0],
        adam_beta2=optimiser.betas[1],
        adam_epsilon=optimiser.eps,
        weight_decay=optimiser.weight_decay,
        max_grad_norm=optimiser.max_grad_norm,
        ddp_find_unused_parameters=False,
        max_steps=args.steps,
        seed=args.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Tick()],
    )
    trainer.train()
    if torch.distributed.is_initialized():  # a process that just exits sometimes aborts
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def race(args: argparse.Namespace) -> None:
    from scalerl.rl.model.named import find_model
    from scalerl.rl.placement.evaluate import Evaluator

    recipe = make_recipe(args.lr, args.steps, "inline")
    model, _ = find_model(recipe)
    evaluator = Evaluator(recipe, model)
    results: dict[str, list[tuple[float, float]]] = {}
    for seed in range(args.repeat):
        for side in args.sides:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                run_side(args, side, model, seed, folder)
                rate = json.loads((folder / "clock.json").read_text())["rate"]
                seconds, at_end = time_to_target(folder, evaluator)
            results.setdefault(side, []).append((rate, seconds))
            what = f"{rate:.0f} completions/s, {seconds:.1f} s to {TARGET}, {at_end:.3f} at the end"
            print(f"{side}, seed {seed}: {what}", flush=True)
    print_table(results)


def run_side(args: argparse.Namespace, side: str, model: str, seed: int, folder: Path) -> None:
    python, options = [sys.executable], []
    if side.startswith("trl"):
        python = [args.trl_python]
        options = ["--threads", str(args.threads), "--cache", args.cache, "--micro", str(args.micro)]
        if args.processes > 1:
            python += ["-m", "torch.distributed.run", "--nproc-per-node", str(args.processes)]
    source = Path(__file__).resolve().parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": str(args.threads), "PYTHONWARNINGS": "ignore::FutureWarning"}
    if side.endswith(PLAIN):
        environment["CC"] = "none"
    command = [
        *python,
        __file__,
        "--side",
        side,
        "--model",
        model,
        "--folder",
        str(folder),
        "--seed",
        str(seed),
    ]
    command += ["--lr", str(args.lr), "--steps", str(args.steps), "--every", str(args.every), *options]
    subprocess.run(command, check=True, env=environment)


def time_to_target(folder: Path, evaluator: Any) -> tuple[float, float]:
    """Return the seconds of training until pass rate TARGET, interpolated between copies of the weights, and
    the final pass rate."""
    import torch

    from scalerl.rl.model.weights import WeightStream

    def pass_rate(step: str) -> float:
        with np.load(folder / f"{step}.npz") as arrays:
            weights = WeightStream.of({name: torch.from_numpy(array) for name, array in arrays.items()})
        return float(evaluator.evaluate(weights, int(step)).correct_P.mean()) / EVALUATED

    seconds: dict[str, float] = json.loads((folder / "clock.json").read_text())["seconds"]
    at_end, before = pass_rate(list(seconds)[-1]), (0.0, 0.0)
    for step, now in seconds.items():
        rate = pass_rate(step)
        if rate >= TARGET:
            share = (TARGET - before[1]) / (rate - before[1])
            return before[0] + share * (now - before[0]), at_end
        before = (now, rate)
    return float("inf"), at_end


def print_table(results: Mapping[str, list[tuple[float, float]]]) -> None:
    print(
        f"\n| side | completions/s, best | median | s to {TARGET:.2f}, best | median |\n|---|---|---|---|---|"
    )
    for side, pairs in results.items():
        rates, times = np.array(pairs).T
        print(f"| {side} | {rates.max():.0f} | {np.median(rates):.0f} ", end="")
        print(f"| {times.min():.1f} | {np.median(times):.1f} |")
    if "trl" not in results:
        return
    print()
    base_rates, base_times = np.array(results["trl"]).T
    for side in [side for side in results if side != "trl"]:
        rates, times = np.array(results[side]).T
        more = rates.max() / base_rates.max(), np.median(rates) / np.median(base_rates)
        sooner = base_times.min() / times.min(), np.median(base_times) / np.median(times)
        print(f"{side}: {more[0]:.1f} times TRL's completions/s (best; {more[1]:.1f} median)", end=", ")
        print(f"1/{sooner[0]:.1f} of its time to {TARGET:.2f} (best; 1/{sooner[1]:.1f} median)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", help="python of a venv with TRL")
    parser.add_argument("--sides", nargs="+", default=["trl", "local", "inline", f"local{PLAIN}"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=5, help="steps between two copies of the weights")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=1, help="TRL: threads of torch, each process")
    parser.add_argument("--processes", type=int, default=2, help="TRL: data-parallel processes")
    parser.add_argument("--micro", type=int, default=256, help="TRL: completions per forward pass, over all")
    parser.add_argument("--cache", default="static", help="TRL: KV cache of generate (or dynamic)")
    for name in ("--side", "--model", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not args.side:
        race(args)
        return
    clock = Clock(Path(args.folder), args.every)
    (run_trl if args.side == "trl" else run_scalerl)(args, clock)
    if clock.step:  # with several processes, only in the first
        clock.write()


if __name__ == "__main__":
    main()
