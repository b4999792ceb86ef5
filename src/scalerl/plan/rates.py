"""The speed of the parts of a run, in seconds: the input of the simulation.

A file of rates is TOML, with one table per part; keys that are left out take their defaults, mostly 0:

    source = "measured on 8 H100, July"
    [decode]
    base = 0.008
    slot = 2e-5
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.plan.job import Lengths


@dataclass(frozen=True)
class Decode:
    """A decode step takes `base` + `slot` per slot in use + `position` per position attended."""

    base: float
    slot: float = 0.0
    position: float = 0.0
    prompt: float = 0.0
    """Prefill seconds per prompt token, once per group; the generator's decode slots wait for it."""


@dataclass(frozen=True)
class Trainer:
    """A step takes `fixed` + `token` per trained token of the trainer with the most tokens."""

    token: float
    fixed: float = 0.0
    used: float = 1.0
    """Share of the groups that enter the loss."""


@dataclass(frozen=True)
class Verify:
    """Seconds to verify a completion in one of `workers` processes."""

    completion: float = 0.0
    workers: int = 1


@dataclass(frozen=True)
class DriverRates:
    """Seconds of the driver's own work."""

    completion: float = 0.0
    """Receiving a completion and making its part of the batch."""
    step: float = 0.0
    """Records, and everything else that is done once per step."""
    overlapped: bool = False
    """Whether it collects while the trainers step, up to one collection ahead (a learner on a cluster)."""


@dataclass(frozen=True)
class WeightRates:
    """Seconds of a weight sync, by part."""

    publish: float = 0.0
    """Seconds for which trainers and driver are blocked."""
    send: float = 0.0
    """Seconds from then until the weights have reached all generators, which decode meanwhile."""
    update: float = 0.0
    """Seconds for which a generator is blocked."""


@dataclass(frozen=True)
class Rates:
    """The rates of all parts."""

    decode: Decode
    trainer: Trainer
    lengths: Lengths
    verify: Verify = field(default_factory=Verify)
    driver: DriverRates = field(default_factory=DriverRates)
    weights: WeightRates = field(default_factory=WeightRates)
    evaluate: float | None = None
    """Seconds of an evaluation by one evaluator on devices of its own, or by one generator if the generators
    evaluate and share it. None takes the time to decode its completions."""
    devices_per_generator: int = 1
    source: str = "given"
    """Where the figures come from, as text."""

    def __post_init__(self) -> None:
        for table in ("decode", "trainer", "verify", "driver", "weights"):
            for name, value in vars(getattr(self, table)).items():
                if not value >= 0:
                    raise ValueError(f"{table}.{name} must not be negative")
        if not self.decode.base + self.decode.slot > 0:
            raise ValueError("decode.base and decode.slot are both 0: a decode step takes time")
        if not 0 < self.trainer.used <= 1:
            raise ValueError("trainer.used must be above 0, and 1 at most")
        if self.verify.workers < 1:
            raise ValueError("verify.workers must be at least 1")
        if self.devices_per_generator < 1 or not (self.evaluate or 0.0) >= 0:
            raise ValueError("devices_per_generator must be at least 1, and evaluate not negative")

    def to_json(self) -> dict[str, Any]:
        """Return the rates as nested plain values."""
        return asdict(self)


def load_rates(source: str | Path | Rates, overrides: Sequence[str] = ()) -> Rates:
    """Read rates from a TOML file or by their name in the package; `overrides` are like `decode.slot=2e-5`.

    `source` can also be measured rates, to change some of them.

    Raises:
        InputError: there is no such file, it is bad TOML, a key is unknown, or a value is out of range.
    """
    from scalerl.rl.config.form import Form, add_override, parse_toml
    from scalerl.rl.config.recipe import changed

    if isinstance(source, Rates):
        values, named = asdict(source), source.source
    else:
        place: Any = Path(source)
        if not place.is_file():
            if str(source) not in names():
                known = ", ".join(names())
                raise InputError(f"{source}: no such file, and no rates of that name (there are: {known})")
            place = _FOLDER / f"{source}.toml"
        values, named = parse_toml(place, source), str(source)
    changes: dict[str, Any] = {}
    for override in overrides:
        add_override(changes, override, "--rate")
    if changes and isinstance(values.get("source"), str):
        values["source"] = f"{values['source']}; changed: {', '.join(overrides)}"
    return Form(Rates).build(changed(values, changes), "--rate" if changes else named)


_FOLDER = resources.files("scalerl") / "plan" / "presets"


def names() -> list[str]:
    """Return the names of the rates in the package."""
    return sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))
