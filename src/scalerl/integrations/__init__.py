"""Forecasts inside tools for training and tuning, with one module per tool, loaded only on use.

It may import `scalerl.forecast` and `scalerl.ingest`. No room imports it.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.integrations.optuna import ForecastPruner as ForecastPruner
    from scalerl.integrations.ray_tune import ForecastScheduler as ForecastScheduler
    from scalerl.integrations.rule import Rule as Rule
    from scalerl.integrations.trainer_callback import ForecastCallback as ForecastCallback


lazy(__name__)
