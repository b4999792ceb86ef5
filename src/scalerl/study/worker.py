"""The process of one run: `python -m scalerl.study.worker`, started by `scalerl.study.job`.

It reads one line of JSON from standard input: {"recipe", "folder", "until"}; and writes lines of JSON to
standard output: {"share", "step", "pass_rate"} after every evaluation and once a second, and at its end
{"outcome", "cause"}, where `outcome` is that of `scalerl.study.record.Attempt`, or "disk". Once its standard
input ends, so does it: whoever started it has gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from scalerl.errors import DivergedError, PausedError, ScalerlError, WriteError


def main() -> None:
    """Run what standard input says."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_follow_the_parent, daemon=True).start()
    outcome, cause = "done", ""
    try:
        _train(task["recipe"], Path(task["folder"]), task["until"])
    except KeyboardInterrupt:
        outcome, cause = "cut", "stopped"
    except WriteError as error:
        outcome, cause = "disk", str(error)
    except DivergedError as error:
        outcome, cause = "diverged", str(error)
    except PausedError as error:
        outcome, cause = "paused", str(error).partition(";")[0]
    except ScalerlError as error:
        outcome, cause = "failed", str(error)
    except Exception as error:
        traceback.print_exc()  # for the log of the run
        outcome, cause = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    _say(outcome=outcome, cause=cause)


def _train(values: dict[str, Any], folder: Path, until: float) -> None:
    from scalerl.curve.freeze import freeze
    from scalerl.rl.base import find_model
    from scalerl.rl.process import stopped_by_signals
    from scalerl.rl.recipe import from_dict
    from scalerl.rl.train import train

    recipe = from_dict(values)
    with stopped_by_signals() as stop:
        model, about = find_model(recipe)
        train(
            recipe,
            folder,
            model,
            resume=True,
            forecaster=freeze,
            watch=_Speaker(),
            extra=about,
            # One core is one run's where it has one process; the record is the same either way.
            evaluate_aside=recipe.placement.kind != "inline",
            stop=stop,
            until=until,
        )


class _Speaker:
    """Tells the parent how far the run is."""

    def __init__(self) -> None:
        self._spoke = -1.0

    def __call__(self, progress: Any) -> None:
        now = time.monotonic()
        if progress.evaluated or now - self._spoke >= 1:
            self._spoke = now
            _say(share=progress.share, step=progress.step, pass_rate=progress.pass_rate)


def _say(**values: Any) -> None:
    values = {key: None if value != value else value for key, value in values.items()}
    print(json.dumps(values), flush=True)


def _follow_the_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
