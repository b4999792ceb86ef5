"""How fast the parts of a run are: what the simulation is told, in seconds.

A file of rates is TOML, one table for each part; what is not said takes its default, and nothing is 0 that
has none:

    source = "measured on 8 H100, July"
    [decode]
    base = 0.008
    row = 2e-5
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from scalerl.errors import InputError
from scalerl.plan.lengths import Lengths


@dataclass(frozen=True)
class Decode:
    """A decode step of a generator takes `base` + `row` per row in use + `position` per position attended."""

    base: float
    row: float = 0.0
    position: float = 0.0
    group: float = 0.0
    """Between two steps for every group: taking it, and handing it over."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if not self.base + self.row > 0:
            raise ValueError("base and row are both 0: a decode step takes time")

    def seconds(self, steps: int, rows: int, positions: int) -> float:
        """Of `steps` decode steps of `rows` rows, which attend to `positions` in the first of them."""
        attended = steps * positions + rows * steps * (steps - 1) / 2
        return steps * (self.base + self.row * rows) + self.position * attended

    def steps_in(self, seconds: float, rows: int, positions: int) -> float:
        """The inverse of `seconds`: how many steps, and what part of one, take so long."""
        square = self.position * rows / 2
        linear = self.base + self.row * rows + self.position * (positions - rows / 2)
        if square == 0:
            return seconds / linear
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))


@dataclass(frozen=True)
class Prefill:
    """Reading a prompt, while which the generator's rows wait."""

    token: float = 0.0
    """Seconds of a token."""
    once: bool = False
    """Once for a group (prefix caching); else once for each time at which completions of it start."""

    def __post_init__(self) -> None:
        _not_negative(self)


@dataclass(frozen=True)
class Trainer:
    """A step takes `fixed` + `token` for each trained token of the trainer that has the most of them."""

    token: float
    fixed: float = 0.0
    used: float = 1.0
    """Share of the groups that enter the loss."""
    micro: float = 0.0
    """Seconds for each micro-batch of a trainer besides."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if not 0 < self.used <= 1:
            raise ValueError("used must be above 0, and 1 at most")


@dataclass(frozen=True)
class Verify:
    """Verification, which the driver waits for."""

    completion: float = 0.0
    """Seconds of a completion."""
    workers: int = 1

    def __post_init__(self) -> None:
        _not_negative(self)
        if self.workers < 1:
            raise ValueError("workers must be at least 1")


@dataclass(frozen=True)
class DriverRates:
    """What the one process that drives the loop does by itself."""

    message: float = 0.0
    """Taking a message: that groups are complete, or that a version is installed."""
    completion: float = 0.0
    """Taking a completion from a message."""
    token: float = 0.0
    """The same, for each of its tokens."""
    group: float = 0.0
    """Admitting a group."""
    generator: float = 0.0
    """Looking at one generator, for every group that is placed."""
    look: float = 0.0
    """The same, where it takes what messages there are."""
    offer: float = 0.0
    """Telling one generator of new weights."""
    batch_token: float = 0.0
    """Making the batch of the trainers."""
    step: float = 0.0
    """Records and whatever else is done once a step."""
    overlapped: bool = False
    """It works while the trainers step, up to one collection ahead (a learner sharded over a cluster)."""
    parts: int = 1
    """In which a group is given to generators; 1 as it is done, more to see what it would do."""
    in_order: bool = True
    """Groups are trained in order of admission, as it is done; or as they are complete, to see that."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if self.parts < 1:
            raise ValueError("parts must be at least 1")


@dataclass(frozen=True)
class Weights:
    """How the weights get into the generators."""

    publish: float = 0.0
    """Seconds in which the driver is held."""
    install: float = 0.0
    """Seconds in which a generator is held."""
    gib: float = 0.0
    """Size of the weights."""
    gib_per_second: float = math.inf
    """Of the link of one generator, or of the sender."""
    latency: float = 0.0
    """Of a message from one to the next, or of asking for a piece."""
    way: Literal["recipe", "flat", "tree", "chain", "spread", "owners"] = "recipe"
    """By the recipe's transport; the sender sends to one after the other; whoever has them sends on; each
    sends on by pieces; all fetch the pieces from the trainers and from each other, or from the trainers
    alone."""
    pieces: int = 64
    """All but `flat` and `tree` send them so."""
    largest: float = 0.0
    """GiB of the largest piece, where pieces are not alike."""
    per_node: int = 1
    """Generators of a node, to which weights go once."""

    def __post_init__(self) -> None:
        _not_negative(self)
        if not self.gib_per_second > 0 or min(self.pieces, self.per_node) < 1:
            raise ValueError("gib_per_second must be above 0, and pieces and per_node at least 1")


@dataclass(frozen=True)
class EvaluateRates:
    """Evaluations on held-out prompts."""

    seconds: float = 0.0
    """Of one."""
    by: Literal["aside", "generators", "trainer"] = "aside"
    """On devices of their own, or while the generators, or the driver and with it the trainers, wait."""

    def __post_init__(self) -> None:
        _not_negative(self)


@dataclass(frozen=True)
class Machine:
    """What generators, trainer and driver share, where they do."""

    cores: float = math.inf
    """A whole number that all processes share as Linux gives them out, and rates are in CPU seconds; without
    a number every role has a device of its own."""
    together: float = 1.0
    """The speed of a core while all work, as a share of that of one that works alone."""
    others: float = 0.0
    """Pieces of work of other jobs, which never end."""

    def __post_init__(self) -> None:
        if not self.cores >= 1 or self.cores % 1 > 0 or not 0 < self.together <= 1 or self.others < 0:
            raise ValueError(
                "cores must be a whole number from 1 on, together a share above 0, and others not negative"
            )


@dataclass(frozen=True)
class Rates:
    """Of all parts."""

    decode: Decode
    trainer: Trainer
    lengths: Lengths
    prefill: Prefill = field(default_factory=Prefill)
    verify: Verify = field(default_factory=Verify)
    driver: DriverRates = field(default_factory=DriverRates)
    weights: Weights = field(default_factory=Weights)
    evaluate: EvaluateRates = field(default_factory=EvaluateRates)
    machine: Machine = field(default_factory=Machine)
    devices_per_generator: int = 1
    source: str = "given"
    """Where the figures are from, in words."""

    def __post_init__(self) -> None:
        if self.devices_per_generator < 1:
            raise ValueError("devices_per_generator must be at least 1")

    def to_json(self) -> dict[str, Any]:
        """As a tree of plain values, without what is infinite."""
        return {key: _finite(value) for key, value in asdict(self).items()}


def load_rates(source: str | Path | Rates, overrides: Sequence[str] = ()) -> Rates:
    """Read a TOML file, or rates of the package by their name; `overrides` are like `decode.row=2e-5`.

    Rates that were measured can be given too, to change some of them.

    Raises:
        InputError: no such file, bad TOML, an unknown key, or a value out of range.
    """
    from scalerl.rl.config.form import Form
    from scalerl.rl.config.toml import add_override, parse_toml

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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _not_negative(table: Any) -> None:
    for item in fields(table):
        value = getattr(table, item.name)
        if isinstance(value, float | int) and not value >= 0:
            raise ValueError(f"{item.name} must not be negative")
