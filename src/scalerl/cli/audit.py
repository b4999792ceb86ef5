"""`scalerl audit`: check what a verifier accepts and rejects, before training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cli.shared.arguments import option, print_json, whole
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.rl.tasks.task import Task
    from scalerl.rl.verify.audit import AuditFinding

HELP = "test the verifier of a task, and check its prompts"
ABOUT = (
    "Test the verifier of a task on reference answers and on wrong ones, and look for\n"
    "repeated and leaked prompts. The exit status is 1 if there is a fault."
)
EXAMPLES = """
  scalerl audit reasoning-gym:gcd
  scalerl audit problems.jsonl --set task.verifier.kind=exact
  scalerl audit scalerl_80gb --prompts 200             # the task of a recipe
  scalerl audit runs/mine --json
"""


def add(audit: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(audit, "task TASK|RECIPE", "a task in one line, a recipe, or a run folder")
    option(audit, "--prompts N", "prompts to try answers for (default: 64)", type=whole(2), default=64)
    option(audit, "--set", "change one key of the task: task.seed=1")
    option(audit, "--json", "print the findings as JSON")


def run(args: argparse.Namespace) -> None:
    """Audit the task, and print the findings."""
    from scalerl.rl.verify.audit import AuditError, audit

    found = list(_counted(audit(_task(args.task, args.set), args.prompts)))
    faults = sum(finding.level == "fault" for finding in found)
    if args.json:
        print_json({"task": args.task, "faults": faults, "findings": [asdict(finding) for finding in found]})
    else:
        rows = [
            (f.level.upper() if f.level == "fault" else f.level, f.check, f.result, f.example) for f in found
        ]
        print_table(rows, ("", "check", "result", "example"))
    if faults:
        raise AuditError(f"{args.task}: {faults} of {len(found)} checks found a fault")


def _counted(found: Iterator[AuditFinding]) -> Iterator[AuditFinding]:
    """Yield findings, and count them on a terminal, as an audit of a slow verifier takes minutes."""
    shown = sys.stderr.isatty()
    for n, finding in enumerate(found, 1):
        if shown:
            print(f"\r{n} checks, the last: {finding.check:<50.50}", end="", file=sys.stderr, flush=True)
        yield finding
    if shown:
        print(f"\r{'':<70}\r", end="", file=sys.stderr, flush=True)


def _task(text: str, overrides: list[str]) -> Task:
    """Return the task of a recipe, of a run folder, or in one line."""
    from scalerl.rl.config.recipe import from_dict, load_recipe, overridden, packaged

    path = Path(text)
    if path.suffix == ".toml" or path.is_dir() or text in packaged():
        return load_recipe(text, overrides).task
    values = {"model": "none", "budget": {"kind": "steps", "amount": 1}, "task": text}
    return from_dict(overridden(values, overrides), text).task
