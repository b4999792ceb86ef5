"""How the consoles of trainers are recognised, and the settings for validation and metrics in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerConsole:
    """The console of one trainer."""

    name: str
    """As its authors write it."""
    signs: str
    """A regular expression: names of its modules and processes, which any of its consoles has."""
    validation: str
    """The settings that switch validation on, of the version that the vocabulary is from."""
    rows: str = ""
    """The setting that prints metrics; empty where they are always printed."""
    note: str = ""
    """What every reader of its rows has to know."""


CONSOLES: Mapping[str, TrainerConsole] = {
    "trl": TrainerConsole(
        "TRL",
        r"\btrl[./]\w|\b(?:GRPO|RLOO)(?:Trainer|Config)\b",
        "eval_strategy='steps' and eval_steps of GRPOConfig, and an eval_dataset",
    ),
    "verl": TrainerConsole(
        "verl",
        r"\bverl[./]\w|\((?:TaskRunner|main_task) pid=",
        "trainer.test_freq",
        "trainer.logger='[\"console\"]'",
    ),
    "skyrl": TrainerConsole(
        "SkyRL",
        r"\bskyrl(?:_train)?[./:]\w|\(skyrl_entrypoint pid=",
        "trainer.eval_interval and data.val_data",
        "trainer.logger=console",
    ),
    "openrlhf": TrainerConsole(
        "OpenRLHF",
        r"\bopenrlhf[./]\w",
        "--eval.steps and --eval.dataset (--eval_steps and --eval_dataset before 0.10)",
    ),
    "nemo-rl": TrainerConsole("NeMo RL", r"\bnemo_rl[./]\w", "grpo.val_period"),
    "prime-rl": TrainerConsole(
        "prime-rl", r"\bprime_rl[./]\w", "orchestrator.eval.interval and orchestrator.eval.source"
    ),
    "slime": TrainerConsole("slime", r"\bslime[./]\w", "--eval-interval and --eval-prompt-data"),
    "open-instruct": TrainerConsole(
        "open-instruct",
        r"\bopen_instruct[./]\w",
        "--local_eval_every and --dataset_mixer_eval_list",
        note="open-instruct prints two decimals: a fit takes rounding for noise; trackers have all digits",
    ),
}
"""By the trainer of the vocabulary."""
_SIGNS = re.compile(
    "|".join(f"(?P<t{n}>{console.signs})" for n, console in enumerate(CONSOLES.values())).encode()
)


def console_of(text: bytes) -> str | None:
    """Return the trainer most of whose signs are in a text; None without any."""
    counts = dict.fromkeys(CONSOLES, 0)
    trainers = list(CONSOLES)
    for found in _SIGNS.finditer(text):
        counts[trainers[int((found.lastgroup or "t0")[1:])]] += 1
    best = max(counts, key=lambda trainer: counts[trainer])
    return best if counts[best] else None
