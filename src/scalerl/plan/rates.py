"""How fast the parts of a run are: what the simulation is told, in seconds.

A file of rates is TOML, one table for each part; what is not said takes its default, and nothing is 0 that
has none:

    source = "measured on 8 H100, July"
    [decode]
    base = 0.008
    row = 2e-5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.plan.lengths import Lengths


@dataclass(frozen=True)
class _Seconds:
    """A table of rates, none of which is negative."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) >= 0:
                raise ValueError(f"{item.name} must not be negative")


@dataclass(frozen=True)
class Decode(_Seconds):
    """A decode step of a generator takes `base` + `row` per row in use + `position` per position attended."""

    base: float
    row: float = 0.0
    position: float = 0.0
    prompt: float = 0.0
    """Of reading a token of a prompt, once for a group, while which the generator's rows wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base + self.row > 0:
            raise ValueError("base and row are both 0: a decode step takes time")


@dataclass(frozen=True)
class Trainer(_Seconds):
    """A step takes `fixed` + `token` for each trained token of the trainer that has the most of them."""

    token: float
    fixed: float = 0.0
    used: float = 1.0
    """Share of the groups that enter the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.used <= 1:
            raise ValueError("used must be above 0, and 1 at most")


@dataclass(frozen=True)
class Verify(_Seconds):
    """Verification of a completion by one of some processes."""

    completion: float = 0.0
    workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1:
            raise ValueError("workers must be at least 1")


@dataclass(frozen=True)
class DriverRates(_Seconds):
    """What the one process that drives the loop does by itself."""

    completion: float = 0.0
    """Taking a completion, and its part of the batch."""
    step: float = 0.0
    """Records and whatever else is done once a step."""
    overlapped: bool = False
    """It collects while the trainers step, up to one collection ahead (a learner sharded over a cluster)."""


@dataclass(frozen=True)
class WeightRates(_Seconds):
    """How new weights get into the generators."""

    publish: float = 0.0
    """Seconds in which trainers and driver are held."""
    send: float = 0.0
    """Seconds from then on until all generators have them, while which these decode."""
    install: float = 0.0
    """Seconds in which a generator is held."""


@dataclass(frozen=True)
class Rates:
    """Of all parts."""

    decode: Decode
    trainer: Trainer
    lengths: Lengths
    verify: Verify = field(default_factory=Verify)
    driver: DriverRates = field(default_factory=DriverRates)
    weights: WeightRates = field(default_factory=WeightRates)
    evaluate: float = 0.0
    """Seconds of an evaluation, which has devices of its own."""
    devices_per_generator: int = 1
    source: str = "given"
    """Where the figures are from, in words."""

    def __post_init__(self) -> None:
        if self.devices_per_generator < 1 or not self.evaluate >= 0:
            raise ValueError("devices_per_generator must be at least 1, and evaluate not negative")

    def to_json(self) -> dict[str, Any]:
        """As a tree of plain values."""
        return asdict(self)


def load_rates(source: str | Path | Rates, overrides: Sequence[str] = ()) -> Rates:
    """Read a TOML file, or rates of the package by their name; `overrides` are like `decode.row=2e-5`.

    Rates that were measured can be given too, to change some of them.

    Raises:
        InputError: no such file, bad TOML, an unknown key, or a value out of range.
    """
    from scalerl.rl.config.form import Form, add_override, parse_toml

    if isinstance(source, Rates):
        values, named = asdict(source), source.source
    else:
        values, named = parse_toml(_find(source), source), str(source)
    changes: dict[str, Any] = {}
    for override in overrides:
        add_override(changes, override, "--rate")
    if changes and isinstance(values.get("source"), str):
        values["source"] = f"{values['source']}; changed: {', '.join(overrides)}"
    return Form(Rates).build(_merged(values, changes), "--rate" if changes else named)


def names() -> list[str]:
    """Of the rates of the package."""
    return sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))


_FOLDER = resources.files("scalerl") / "plan" / "presets"


def _find(source: str | Path) -> Any:
    path = Path(source)
    if path.is_file():
        return path
    if str(source) not in names():
        known = ", ".join(names())
        raise InputError(f"{source}: no such file, and no rates of that name (there are: {known})")
    return _FOLDER / f"{source}.toml"


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for key, change in changes.items():
        before = out.get(key)
        both = isinstance(change, Mapping) and isinstance(before, Mapping)
        out[key] = _merged(before, change) if both else change  # type: ignore[arg-type]
    return out
