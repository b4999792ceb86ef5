"""Forecasts inside the tools that train and tune, each module for one of them and loaded with it alone.

It may import `scalerl.forecast` and `scalerl.ingest`. No room imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.integrations.optuna import ForecastPruner
    from scalerl.integrations.ray_tune import ForecastScheduler
    from scalerl.integrations.rule import Rule
    from scalerl.integrations.trainer_callback import ForecastCallback

__all__ = ["ForecastCallback", "ForecastPruner", "ForecastScheduler", "Rule"]

lazy(__name__)
