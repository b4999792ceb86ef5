"""The recipe: every choice of a run in one frozen object.

A recipe is written by hand as sparse TOML, where a missing key takes its default, and is saved in full in
config.json. Choices with variants are objects. In TOML `kind` names the variant; a table without `kind` is of
the default one, and a custom class is named by its location (`scalerl.own_code`):

    [loss]
    kind = "cispo"              # or "my_package.losses:Topr"
    max_ratio = 4.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator

from scalerl.errors import InputError
from scalerl.files import as_path
from scalerl.jsonl import read_object
from scalerl.kinds import Choice, choices_of, values_of
from scalerl.own_code import absolute, beside
from scalerl.rl.algo.advantage import Advantage, AnyAdvantage, BatchStd
from scalerl.rl.algo.averaging import AnyAveraging, Averaging, PromptAverage
from scalerl.rl.algo.checked import try_advantage, try_averaging, try_curriculum, try_length, try_loss
from scalerl.rl.algo.curriculum import AnyCurriculum, Curriculum, NoPositiveResampling
from scalerl.rl.algo.length import AnyLength, ForcedInterruption, LengthControl, LengthPenalty
from scalerl.rl.algo.loss import AnyLoss, Cispo, Kl, Loss, check_cut
from scalerl.rl.algo.schedule import AnySchedule, PipelineRL
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.engine import AnyEngine, BuiltInEngine, Vllm
from scalerl.rl.config.form import Form, add_override, parse_toml
from scalerl.rl.config.health import Health
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import (
    AnyBudget,
    BatchSize,
    Checkpointing,
    Context,
    Evaluation,
    Inline,
    LearnerSettings,
    Local,
    Lora,
    Samples,
    Timeouts,
    Tracking,
    at_least,
    usable_cores,
)
from scalerl.rl.tasks.mix import Mix, OneTask
from scalerl.rl.tasks.shorthand import in_full
from scalerl.rl.tasks.task import Task, prompts_of

HELDOUT = ""
"""The name of the held-out prompts of a run, among the names of its downstream suites."""
MOST_THREADS = 1024
"""Most threads of a process: the system refuses more without a helpful message."""
AnyTask = OneTask | Mix
"""The tasks of the package that a recipe can name."""


@dataclass(frozen=True)
class Recipe:
    """The ScaleRL recipe (arXiv 2510.13786, section 2): the defaults that affect training are the paper's."""

    model: str
    """A Hugging Face causal LM: a folder, or a name."""
    task: Annotated[Task, Choice("tasks", Task, AnyTask)]
    budget: Annotated[AnyBudget, Discriminator("kind")]
    name: str = "scalerl"
    seed: int = 0
    schedule: Annotated[AnySchedule, Discriminator("kind")] = field(default_factory=PipelineRL)
    loss: Annotated[Loss, Choice("losses", Loss, AnyLoss, try_loss)] = field(default_factory=Cispo)
    kl: Kl = field(default_factory=Kl)
    averaging: Annotated[Averaging, Choice("averagings", Averaging, AnyAveraging, try_averaging)] = field(
        default_factory=PromptAverage
    )
    advantage: Annotated[Advantage, Choice("advantages", Advantage, AnyAdvantage, try_advantage)] = field(
        default_factory=BatchStd
    )
    zero_variance: Literal["drop", "keep", "resample"] = "drop"
    """Rule for groups without signal; `resample` replaces them by more groups until the batch is full."""
    truncated: Literal["drop", "keep"] = "drop"
    curriculum: Annotated[Curriculum, Choice("curricula", Curriculum, AnyCurriculum, try_curriculum)] = field(
        default_factory=NoPositiveResampling
    )
    length: Annotated[LengthControl, Choice("lengths", LengthControl, AnyLength, try_length)] = field(
        default_factory=ForcedInterruption
    )
    end_of_thinking: str = "</think>"
    stop: tuple[str, ...] = ()
    """Texts that also end a completion and are verified with it; a token that begins with one is the last."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Sample from the fewest tokens with this total probability, in evaluations too; 1 for all tokens."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 for all tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation in generator and trainer; the trainer keeps master weights in float32."""
    fp32_logits: Literal["both", "generator", "trainer", "neither"] = "both"
    """Roles whose LM head computes in float32 whatever the precision."""
    routing_replay: bool = False
    """Whether a mixture of experts is trained with the experts that the generator chose for each token
    (R3, arXiv 2510.11370), instead of those that the trainer's routers choose."""
    lora: Lora = field(default_factory=Lora)
    batch: BatchSize = field(default_factory=BatchSize)
    context: Context = field(default_factory=Context)
    optimiser: AdamW = field(default_factory=AdamW)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    engine: Annotated[AnyEngine, Discriminator("kind")] = field(default_factory=BuiltInEngine)
    """The engine that samples completions, in training and evaluations: the built-in one, or vLLM."""
    decode_slots: int = 768
    """Completions that a generator decodes at once."""
    threads: int = 1
    """CPU threads of PyTorch in each process that computes the model; 0 for all cores. With more than 1, runs
    may differ between machines, first in the last digits and then in the sampled tokens."""
    placement: Annotated[Inline | Local, Discriminator("kind")] = field(default_factory=Inline)
    cluster: Cluster | None = None
    """Placement on a Ray cluster; without it, `placement` applies."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    samples: Samples = field(default_factory=Samples)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: Health = field(default_factory=Health)
    tracking: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        if not 0.01 <= self.temperature <= 100:
            raise ValueError("temperature must be between 0.01 and 100")
        check_cut(self.top_p, self.top_k, self.loss)
        if "" in self.stop:
            raise ValueError("stop: an empty text would end every completion")
        at_least(1, decode_slots=self.decode_slots)
        at_least(0, seed=self.seed, threads=self.threads)
        if self.threads > MOST_THREADS:
            raise ValueError(f"threads must be at most {MOST_THREADS}")
        for name, choice in choices_of(Recipe).items():
            choice.check_object(getattr(self, name), name)
        if self.cluster is not None and self.placement != Inline():
            how = "leave placement out, and give --generators with --cluster ray"
            raise ValueError(f"placement: with [cluster], that says where everything is; {how}")
        if self.vllm is not None:
            self._check_vllm(self.vllm)
        self.optimiser.check_decay(self.budget)
        if isinstance(self.length, ForcedInterruption | LengthPenalty):
            length = self.length.within(self.context.thinking, self.context.answer)
            object.__setattr__(self, "length", length)
        forced = self.length.interruption()
        if forced is not None and not forced.phrase.endswith(self.end_of_thinking):
            raise ValueError(f"length.phrase: must end with {self.end_of_thinking!r}")
        if forced is not None and any(task.turns > 1 for task, _ in self.evaluated.values()):
            raise ValueError(
                "length: environments of several turns do not go with an interruption; set length.kind to "
                '"none" or "length_penalty"'
            )
        tasks = self.task.tasks if isinstance(self.task, Mix) else ()
        if taken := [suite.name for suite in self.evaluation.downstream if suite.name in tasks]:
            raise ValueError(f"evaluation.downstream: {taken[0]!r} is also the name of a task of the mixture")

    def _check_vllm(self, engine: Vllm) -> None:
        if not self.apart:
            raise ValueError('engine: vLLM is beside the trainer: set placement.kind to "local"')
        if self.routing_replay:
            raise ValueError("routing_replay: vLLM does not return the experts that it chose; leave it false")
        if self.cluster is not None:
            self.cluster.check_vllm(engine)
        if engine.urls and (self.cluster or self.placement).generators > 1:
            raise ValueError("generators: engine.urls names all servers; leave it out")

    def fp32_head(self, role: Literal["generator", "trainer"]) -> bool:
        """Return whether the LM head of a role computes in float32 whatever the precision."""
        return self.fp32_logits in ("both", role)

    @property
    def cpu_threads(self) -> int:
        """Threads of each process that computes the model, on this machine."""
        return self.threads or usable_cores()

    @property
    def vllm(self) -> Vllm | None:
        """The settings of vLLM, if it is the engine."""
        return self.engine if isinstance(self.engine, Vllm) else None

    @property
    def processes(self) -> int:
        """Number of processes that decode."""
        return len(self.vllm.urls if self.vllm else ()) or (self.cluster or self.placement).generators

    @property
    def apart(self) -> bool:
        """Whether generators have devices of their own; else they take turns with the trainer on its."""
        return self.cluster is not None or isinstance(self.placement, Local)

    @property
    def devices(self) -> int:
        """Number of devices whose time is counted: those of generators and trainers."""
        each = self.vllm.tensor_parallel if self.vllm else 1
        return self.processes * each + self.trainers if self.apart else self.trainers

    @property
    def trainers(self) -> int:
        """Number of processes that train, unless torchrun has started another number."""
        return (self.cluster or self.placement).trainers

    @property
    def on_cluster(self) -> Cluster:
        """`cluster`, for code that runs only if the recipe has one."""
        if self.cluster is None:
            raise ValueError("the recipe has no [cluster]")
        return self.cluster

    def on_this_machine(self) -> Recipe:
        """Return a copy without `[cluster]`, for trainers started by torchrun."""
        placement = Local(self.cluster.generators) if self.vllm and self.cluster else self.placement
        return replace(self, cluster=None, placement=placement)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the step that makes version `step` + 1."""
        return self.optimiser.lr_at(step, self.optimiser.decay_steps or self.budget.amount)

    @property
    def evaluated(self) -> dict[str, tuple[Task, int]]:
        """Task and completions per prompt, of `HELDOUT` and of every downstream suite, by name."""
        suites = {suite.name: (suite.task, suite.samples) for suite in self.evaluation.downstream}
        return {HELDOUT: (self.task, self.evaluation.samples), **suites}

    @property
    def evaluations(self) -> float:
        """Evaluations over the budget, without the one before training; NaN if not known before the run."""
        if not self.evaluation.every:
            return self.evaluation.count
        by_steps = self.budget.kind == "steps"
        return self.budget.amount / self.evaluation.every if by_steps else math.nan

    def budget_on_axis(self) -> tuple[str, float]:
        """Return the compute axis of the budget and its end on it; epochs are converted to completions."""
        if self.budget.kind != "epochs":
            return self.budget.kind, self.budget.amount
        return "samples", self.budget.amount * len(prompts_of(self.task, "train")) * self.batch.samples

    def without_prompts(self) -> Recipe:
        """Return a copy to send to other processes: without loaded prompts, so that it is small, and of
        classes that they can import."""
        return from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe in full, as in config.json; `from_dict` reads it."""
        values = values_of(self)
        if self.cluster is None:
            del values["cluster"]
        return values

    def to_json(self) -> dict[str, Any]:
        """Return `to_dict` with infinities as "inf", which JSON lacks; `from_dict` reads this too."""
        return _with_words(self.to_dict())


def _with_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    return "inf" if value == math.inf else value


def from_dict(values: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Check `values` and build the recipe."""
    return _FORM.build(_with_kinds(values), source)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a TOML file, from a run folder, or by its name in the package.

    Overrides are strings like `loss.max_ratio=4`.

    Raises:
        InputError: there is no such recipe, it is bad TOML, or a value is wrong (`from_dict`).
    """
    return from_dict(read_toml(source, overrides), str(source))


def read_toml(source: str | Path, overrides: Sequence[str] = (), above: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sparse values of a recipe, merged over those of its chain of bases, with overrides applied.

    Raises:
        InputError: there is no such recipe or base, it is bad TOML, or an override is wrong.
    """
    values = _values(source)
    base = values.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise InputError(f"{source}: base must be the name of a recipe, a file or a run folder")
    above = (*above, str(source))
    if base in above:
        raise InputError(f"{source}: base {base!r} has this one as its base; name another")
    if base is not None:
        try:
            values = changed(read_toml(base, above=above), values)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
    return overridden(values, overrides)


def _values(source: str | Path) -> dict[str, Any]:
    """Return the values of one file or run folder, without its base; tasks in one line become tables."""
    path: Path | Traversable = as_path(source)
    if path.is_dir() and (path / "config.json").is_file():
        return recipe_of_run(path / "config.json")
    if not path.is_file():
        # A folder that is not a run may have the name of a recipe, such as a study of smollm2 in smollm2/.
        known = packaged()
        if str(source) not in known:
            why = f"no such file, and no recipe of that name (there are: {', '.join(known)})"
            if path.is_dir():
                why = "no config.json in this folder, so it is no run with a recipe"
            raise InputError(f"{source}: {why}")
        path = known[str(source)]
    values = in_full(parse_toml(path, source))
    return beside(path.parent, values) if isinstance(path, Path) else values


def packaged() -> dict[str, Traversable]:
    """Return the files of the package's recipes by name, in alphabetical order."""
    files = sorted((resources.files("scalerl") / "recipes").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files}


def recipe_of_run(path: Path) -> dict[str, Any]:
    """Return the values of the recipe in the config.json `path`; raise an InputError if it has none."""
    recipe = read_object(path).get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{path}: holds no recipe (only runs of scalerl train do)")
    return recipe


def changed(values: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a recipe with `changes` merged into them, table by table.

    A table of another kind replaces the whole table: parameters of the previous kind are dropped, even if the
    new kind has some of the same name.
    """
    out = dict(values)
    for key, change in changes.items():
        before = out.get(key, {})
        if not isinstance(change, Mapping):
            out[key] = change
        elif not isinstance(before, Mapping):
            raise InputError(f"{prefix + key!r} is a value, not a table")
        else:
            kind = before.get("kind", _default_kind(prefix + key))
            same = absolute(str(change.get("kind", kind))) == absolute(str(kind))
            kept = before if same else {}
            out[key] = changed(kept, change, f"{prefix}{key}.")
    return out


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a recipe with overrides like `loss.max_ratio=4` applied."""
    values = in_full(values)
    changes: dict[str, Any] = {}
    for override in overrides:
        add_override(changes, override)
        if isinstance(changes.get("task"), str):  # expand it now, as the next override may change a key of it
            changes = in_full(changes)
            values = {key: value for key, value in values.items() if key != "task"}  # replaced as a whole
    try:
        return changed(values, changes)
    except InputError as error:
        raise InputError(f"--set: {error}") from None


def _default_kind(name: str) -> str | None:
    """Return the default kind of a choice."""
    for item in fields(Recipe):
        if item.name == name and item.default_factory is not MISSING:
            return getattr(item.default_factory(), "kind", None)
    return None


def _with_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default kind to choices without one: `loss.max_ratio = 4` is CISPO's.

    If `values` do not name the averaging and the advantage, they are those that the loss comes with.
    """
    out = in_full(values)
    loss, losses = values.get("loss"), choices_of(Recipe)["loss"].variants
    of_loss = losses.get(str(loss.get("kind"))) if isinstance(loss, Mapping) else None
    brought: Mapping[str, str] = getattr(of_loss, "comes_with", {})  # a wrong kind is reported later
    for item in fields(Recipe):
        value, kind = out.get(item.name), brought.get(item.name, _default_kind(item.name))
        if isinstance(value, Mapping) and kind:
            out[item.name] = {"kind": kind, **value}
    return {name: {"kind": kind} for name, kind in brought.items()} | out


_FORM = Form(Recipe)
