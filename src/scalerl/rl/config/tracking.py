"""The recipe's table `tracking`: where a run is logged besides its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def _listed(value: Any) -> Any:
    """One name is a list of one: `--set tracking.to=wandb`."""
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class Tracking:
    """Trackers that a run is logged to; nothing that is trained depends on them."""

    to: Annotated[
        tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...], BeforeValidator(_listed)
    ] = ()
    project: str = "scalerl"
    """Of W&B and trackio; MLflow calls it an experiment."""
    name: str = ""
    """Of the run; that of its folder where it is empty."""
    group: str = ""
    """Of runs that belong together; a study's name is that of its runs."""
    close_seconds: float = 30.0
    """The longest that trackers have at the end of a run for what is not logged yet."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("project must not be empty")
        if not 0 <= self.close_seconds < math.inf:
            raise ValueError("close_seconds must not be negative")
