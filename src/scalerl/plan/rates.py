"""How fast the parts of a run are, in seconds: the input of the simulation.

A file of rates is TOML, one table for each part; what is left out takes its default, and is 0 where that is:

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
    """Prefill of a token of a prompt, once for a group; the generator's decode slots wait for it."""


@dataclass(frozen=True)
class Trainer:
    """A step takes `fixed` + `token` for each trained token of the trainer that has the most of them."""

    token: float
    fixed: float = 0.0
    used: float = 1.0
    """Share of the groups that enter the loss."""


@dataclass(frozen=True)
class Verify:
    """Verification of a completion by one of some processes."""

    completion: float = 0.0
    workers: int = 1


@dataclass(frozen=True)
class DriverRates:
    """Seconds of the driver's own work."""

    completion: float = 0.0
    """Taking a completion, and its part of the batch."""
    step: float = 0.0
    """Records and whatever else is done once a step."""
    overlapped: bool = False
    """Whether it collects while the trainers step, up to one collection ahead (a learner on a cluster)."""


@dataclass(frozen=True)
class WeightRates:
    """Seconds of a weight sync, by part."""

    publish: float = 0.0
    """Seconds in which trainers and driver are held."""
    send: float = 0.0
    """Seconds from then on until all generators have them; they decode meanwhile."""
    update: float = 0.0
    """Seconds in which a generator is held."""


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
    """Seconds of an evaluation by one evaluator, on devices of its own; by one generator, where generators
    evaluate, which share it. None: what its completions take to decode."""
    devices_per_generator: int = 1
    source: str = "given"
    """Source of the figures, a text."""

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
        """Return the rates as a tree of plain values."""
        return asdict(self)


def load_rates(source: str | Path | Rates, overrides: Sequence[str] = ()) -> Rates:
    """Read a TOML file, or rates of the package by their name; `overrides` are like `decode.slot=2e-5`.

    Rates that were measured can be given too, to change some of them.

    Raises:
        InputError: no such file, bad TOML, an unknown key, or a value out of range.
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
    """Return the names of the rates of the package."""
    return sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))
