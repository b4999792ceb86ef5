"""Check on a GPU what only a GPU can show, in order of worth; 45 minutes on one, without a network.

    python scripts/gpu_check.py [--out gpu_check.jsonl] [--minutes 45] [--only NAME ...]
    python scripts/gpu_check.py --list
    python scripts/gpu_check.py --tiny [--only NAME ...]

Every check runs in a process of its own, with a time limit of its own, so that a hang, an illegal access or
exhausted memory costs that check alone. One JSON line is printed and appended to `--out` per check: `check`,
`status` (ok, failed, skipped, timeout), `seconds`, `figures`, and where it failed `error`. A second call
goes on after the checks that are in `--out` with status ok. Models have random weights of real shapes.

`--tiny` runs the same code on whatever there is, with shapes of no size: to see that the script works.
Exit status: 0 where no check failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from gpu_checks import CHECKS, Check, SkippedError  # noqa: E402

_TINY_SECONDS = 240


def main() -> None:
    """Parse the arguments, and run one check here or all of them in processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"), help="appended to")
    parser.add_argument("--minutes", type=float, default=45, help="of all checks together")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, whatever is in --out")
    parser.add_argument("--tiny", action="store_true", help="shapes of no size, on any machine")
    parser.add_argument("--list", action="store_true", help="print the checks with their limits")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [check.name for check in CHECKS]
    if unknown := [name for name in [*(args.only or []), *filter(None, [args.here])] if name not in names]:
        parser.error(f"unknown check {unknown[0]!r}; one of {', '.join(names)}")
    if args.list:
        for check in CHECKS:
            print(f"{check.name:<12} {check.seconds:>4} s  {check.says}")
        return
    if args.here:
        print(json.dumps(run_here(_named(args.here), args.tiny)))
        return
    if not args.tiny and not _has_gpu():
        parser.error("needs a CUDA device; --tiny runs anywhere")
    sys.exit(run_all(args.out, args.minutes, args.only, args.tiny))


def run_here(check: Check, tiny: bool) -> dict[str, Any]:
    """Run one check in this process; return its status and figures."""
    from gpu_checks.lab import Lab

    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"status": "ok", "figures": check.run(Lab.of(tiny, Path(folder)))}
        except SkippedError as reason:
            return {"status": "skipped", "error": str(reason)}


def run_all(out: Path, minutes: float, only: list[str] | None, tiny: bool) -> int:
    """Run the checks that are not done yet, in order; return the exit status."""
    done = set() if only else _done(out)
    started, failed = time.monotonic(), 0
    for check in CHECKS:
        if check.name in done or (only and check.name not in only):
            continue
        left = minutes * 60 - (time.monotonic() - started)
        if left < 5:
            print(f"out of time before {check.name}", file=sys.stderr)
            break
        line = {"check": check.name, **_in_process(check, min(left, check.seconds), tiny)}
        failed += line["status"] not in ("ok", "skipped")
        print(json.dumps(line), flush=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return int(failed > 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _done(out: Path) -> set[str]:
    lines = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
    return {line["check"] for line in lines if line["status"] == "ok"}


def _named(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


def _in_process(check: Check, seconds: float, tiny: bool) -> dict[str, Any]:
    """Run a check in its own process group, which is killed at its time limit."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", check.name, *["--tiny"] * tiny]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, complained = process.communicate(timeout=max(seconds, _TINY_SECONDS * tiny))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"status": "timeout", "seconds": round(time.monotonic() - started, 1)}
    took = round(time.monotonic() - started, 1)
    if process.returncode:
        error = complained.strip().splitlines()[-8:]
        return {"status": "failed", "seconds": took, "error": error or [f"exit status {process.returncode}"]}
    return {"seconds": took, **json.loads(printed.strip().splitlines()[-1])}


if __name__ == "__main__":
    main()
