"""Attack every reader with inputs that nobody would log; print time, memory and outcome of each format.

    python benchmarks/attack.py [--formats jsonl wandb ...] [--sample 20] [--json]

Every input of `attack_corpus.py`, some 700, is written into a folder that is removed, and given to the
command that reads such things, in a process forked once everything is imported. A fault is a traceback or a
warning of NumPy's, more than 10 s of CPU or 1 GB of memory, an end that is not of the documented exit
statuses, a refusal of what is sound, or evaluations kept and left out that are not as many as an undamaged
input holds. With any of them the status is 1.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a parent's threads do not exist in its forks

from attack_corpus import Input, corpus, rows
from attack_formats import jsonl, run_folder

SECONDS, MEGABYTES = 10.0, 1000.0
"""Limits on CPU time and on resident memory, including the interpreter and its imports."""
WAIT_SECONDS = 120.0
"""Wall-clock limit after which an input counts as a hang."""
_MOST_BYTES = 8 << 30
"""Address space of a process, so that a fault does not bring the machine down."""


@dataclass(frozen=True)
class Outcome:
    """How reading one input ended."""

    format: str
    name: str
    seconds: float
    megabytes: float
    outcome: str
    """`read`, `refused`, `cannot answer`, or a fault in words."""
    text: str
    """Last line of what the command printed, or of its traceback."""

    @property
    def is_fault(self) -> bool:
        """Whether the outcome is a fault."""
        return self.outcome not in ("read", "refused", "cannot answer")


def words(one: Input, source: Path | str, folder: Path) -> list[str]:
    """Return the command line that reads an input and writes to `folder`."""
    out = str(folder / "out")
    return {
        "ingest": ["ingest", str(source), "-o", out, "--json"],
        "fit": ["fit", str(source), "--json"],
        "report": ["report", str(source), "-o", f"{out}.html"],
        "overlay": ["report", str(source), str(folder / "sound" / "run"), "-o", f"{out}.html"],
        "study": ["study", str(source), "--dry-run"],
        "train": ["train", str(source), "-o", out, "--set", f"model={folder / 'no-model'}"],
    }[one.command]


def attack(one: Input, slowness: float = 1.0) -> Outcome:
    """Write an input, read it in its own process, and judge the outcome."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        (folder / "cwd").mkdir()
        (folder / "sound").mkdir()
        run_folder(folder / "sound", rows())
        source, holds = _forked(lambda: _written(one, folder / "source"))
        child = os.fork()
        if not child:
            _read(words(one, source, folder), folder)
        status, seconds, megabytes, waited = _wait(child, slowness)
        out, err = ((folder / end).read_text(errors="replace") for end in ("stdout", "stderr"))
    kind = _judged(one, holds, status, seconds / slowness, megabytes, waited, out, err)
    text = (err or out).strip().splitlines()
    return Outcome(one.format, one.name, seconds, megabytes, kind, text[-1][:300] if text else "")


def _written(one: Input, folder: Path) -> tuple[str, int | None]:
    return str(one.write(folder)), one.evaluations() if one.evaluations is not None else None


def _forked(work: Callable[[], tuple[str, int | None]]) -> tuple[str, int | None]:
    """Return what `work` returns, run in a fork so that its memory does not stay in this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("an input could not be written")
    path, number = json.loads(text)
    return path, number


def _read(command: list[str], folder: Path) -> None:
    """Run the command in the child with its output in files, and exit; never returns."""
    status = 70
    try:
        for number, end in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / end, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder / "cwd")
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        warnings.simplefilter("error", RuntimeWarning)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        status = import_module("scalerl.cli.main").main(command)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, slowness: float) -> tuple[int, float, float, bool]:
    """Wait; return exit status, CPU seconds, peak memory in MB, and whether it hung and was killed."""
    limit, waited = time.monotonic() + WAIT_SECONDS * slowness, False
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            break
        if not waited and time.monotonic() > limit:
            waited = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    return code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, waited


def _judged(
    one: Input,
    holds: int | None,
    status: int,
    seconds: float,
    megabytes: float,
    waited: bool,
    out: str,
    err: str,
) -> str:
    if waited:
        return "HANG"
    if "Traceback" in err or status not in (0, 2, 3):
        return f"TRACEBACK (status {status})"
    if megabytes > MEGABYTES:
        return "MEMORY"
    if seconds > SECONDS:
        return "TIME"
    if status and one.must_read:
        return "REFUSED, though sound"
    if status and err.count("\n") != 1:
        return "REFUSED in several lines"
    if not status and holds is not None and (found := accounted(out)) != holds:
        return f"ACCOUNTS for {found} of {holds} evaluations"
    return {0: "read", 2: "refused", 3: "cannot answer"}[status]


def accounted(text: str) -> int:
    """Return the number of evaluations, kept or left out, in the JSON of `ingest` or `fit`."""
    found = json.loads(text)
    runs = found.get("runs", [found])
    return sum(run.get("evaluations", run.get("points", 0)) + run["left_out"]["total"] for run in runs)


def slowness() -> float:
    """Return how many times slower this machine is than the one the limits were set on; at least 1."""
    started, text = time.process_time(), json.dumps([{"a": n} for n in range(50_000)])
    for _ in range(5):
        json.loads(text)
    return max(1.0, (time.process_time() - started) / 0.30)


def outcomes(inputs: Sequence[Input]) -> Iterator[Outcome]:
    """Yield the outcome of every input, in order."""
    for command in (
        "ingest",
        "fit",
        "report",
        "overlay",
    ):  # import everything once, not in every fork
        warm_up(command)
    gc.freeze()  # forks then do not scan it in garbage collections
    factor = slowness()
    for one in inputs:
        yield attack(one, factor)


def warm_up(command: str) -> None:
    """Read a sound input in this process, so that forks need not repeat the imports."""
    with (
        tempfile.TemporaryDirectory() as name,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        folder = Path(name)
        (folder / "sound").mkdir()
        run_folder(folder / "sound", rows())
        source = run_folder(folder, rows())
        if command == "ingest":
            source = jsonl(folder, rows())
        import_module("scalerl.cli.main").main(
            words(Input("", "", lambda _: source, command), source, folder)
        )


def sampled(inputs: Sequence[Input], n: int) -> list[Input]:
    """Return `n` of the inputs, spread over all formats."""
    step = max(len(inputs) // n, 1)
    return [*inputs[::step]][:n]


def table(found: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a table with a row for every format."""
    yield f"| {'format':<14}| inputs | read | refused | s, largest | MB, largest | faults |"
    yield f"|{'-' * 15}|-------:|-----:|--------:|-----------:|------------:|-------:|"
    for format in dict.fromkeys(one.format for one in found):
        those = [one for one in found if one.format == format]
        read = sum(one.outcome == "read" for one in those)
        faults = sum(one.is_fault for one in those)
        cells = (
            *(f"{len(those):>6}", f"{read:>4}", f"{len(those) - read - faults:>7}"),
            *(f"{max(one.seconds for one in those):>10.1f}", f"{max(one.megabytes for one in those):>11.0f}"),
            f"{faults:>6}",
        )
        yield f"| {format:<14}| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", help="only these")
    parser.add_argument("--names", nargs="+", help="only inputs of these names")
    parser.add_argument("--sample", type=int, help="so many inputs, spread over the formats")
    parser.add_argument("--json", action="store_true", help="a line of JSON for every input, and no table")
    args = parser.parse_args()
    inputs = [one for one in corpus() if not args.formats or one.format in args.formats]
    inputs = [one for one in inputs if not args.names or one.name in args.names]
    inputs = sampled(inputs, args.sample) if args.sample else inputs
    found = []
    for one in outcomes(inputs):
        found.append(one)
        if args.json:
            print(json.dumps(asdict(one)), flush=True)
    if not args.json:
        print("\n".join(table(found)))
    faults = [one for one in found if one.is_fault]
    for one in faults:
        took = f"{one.seconds:.1f} s, {one.megabytes:.0f} MB"
        print(f"{one.format} {one.name}: {one.outcome} ({took}) {one.text}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
