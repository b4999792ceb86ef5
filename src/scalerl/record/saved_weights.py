"""The weights that a run has on disk, each tied by folder name to its version: the step that made them."""

import re
from pathlib import Path

from scalerl.errors import InputError
from scalerl.jsonl import read_object

_NAMED = re.compile(r"(?P<kind>step|best)-(?P<step>\d+)")


def saved_weights(run: Path) -> dict[int, Path]:
    """Return the model folders in `checkpoints/` by their step.

    `best-00040` and `step-00040` are of step 40, `final` is of the step in its finished.json. Checkpoints
    made within a step are left out: their weights are those of the step before. For one step the final
    weights take precedence, then `best-`, which no newer checkpoint replaces by its age.
    """
    found: dict[int, Path] = {}
    for kind in ("step", "best"):
        for path in sorted((run / "checkpoints").glob(f"{kind}-*")):
            if (named := _NAMED.fullmatch(path.name)) and path.is_dir():
                found[int(named["step"])] = path
    final = final_folder(run)
    try:
        step = read_object(final / "finished.json").get("step") if final.is_dir() else None
    except InputError:  # older versions did not write it
        step = None
    return found | ({step: final} if isinstance(step, int) else {})


def final_folder(run: Path) -> Path:
    """Return the folder of the final weights of the run folder `run`, where they are once it has ended."""
    return run / "checkpoints" / "final"
