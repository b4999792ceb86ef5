"""Device-seconds worked out by hand: every device that is held counts, by role, shared or idle."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from scalerl.record.evaluation import DeviceSeconds, EvalPoint, Flops, Tokens, compute_of
from scalerl.rl.config.cluster import Cluster, Fsdp2, Resources
from scalerl.rl.config.devices import Assignment, HeldDevices
from scalerl.rl.config.engine import Vllm
from scalerl.rl.learner.batch import StepStats
from scalerl.rl.loop.counters import RunCounters
from scalerl.rl.types import Counters


@dataclass
class NoFates:
    fates: tuple = ()


@dataclass
class Times:
    """A step of which only the times matter."""

    train_seconds: float
    waited_seconds: float
    stats: StepStats = field(default_factory=StepStats)
    groups: tuple = ()
    batch: NoFates = field(default_factory=NoFates)


def step_of(train_seconds, waited_seconds) -> Any:
    """A step as the counters take it."""
    return Times(train_seconds, waited_seconds)


def gpu_hours(counters):
    seconds = DeviceSeconds(**counters.json()["device_seconds"])
    point = EvalPoint(1, 0.5, device_seconds=seconds, flops=Flops(), tokens=Tokens())
    return compute_of(point, "gpu_hours")


def test_an_hour_of_two_servers_on_four_gpus_each_and_four_trainers_is_twelve():
    cluster = Cluster(
        generators=2,
        learner=Fsdp2(),
        trainers=4,
        trainer=Resources(gpus=1),
        generator=Resources(gpus=0.5),
    )
    held = HeldDevices.on_cluster(cluster, Vllm(tensor_parallel=4))
    counters = RunCounters(2, 4, held, apart=True)
    # Two servers of which each decoded for 1,800 s of its hour, and took 100 s to start.
    counters.add(step_of(900, 600), Counters(seconds=3600, held=7200, startup=200), wall_seconds=3600)
    seconds = counters.json()["device_seconds"]
    assert gpu_hours(counters) == pytest.approx(12)
    assert seconds["generate"] == pytest.approx(3600 * 4)
    assert seconds["train"] == pytest.approx(900 * 4)
    assert seconds["idle"] == pytest.approx(12 * 3600 - 3600 * 4 - 900 * 4)
    assert seconds["startup"] == pytest.approx(200 * 4)
    assert counters.waited_seconds == pytest.approx(600 * 4)
    assert counters.devices == {"generate": 8, "train": 4, "evaluate": 8}
    counters.add_evaluation(60, 0)  # off the axis, and on both servers
    assert counters.evaluate_seconds == pytest.approx(60 * 8)
    assert gpu_hours(counters) == pytest.approx(12)


def test_an_evaluation_of_its_own_actor_is_counted_with_what_that_requests():
    cluster = Cluster(generator=Resources(gpus=0.5))
    counters = RunCounters(1, 1, HeldDevices.on_cluster(cluster), apart=True)
    counters.add_evaluation(60, 10)
    assert counters.devices["evaluate"] == 0.5
    assert counters.evaluate_seconds == pytest.approx(30)
    assert counters.startup_seconds == pytest.approx(5)
    assert gpu_hours(counters) == 0


@pytest.mark.parametrize(
    ("held", "apart", "whole"),
    [
        # Eight GPUs, one of which evaluates; the same with four generators, the last of which evaluates too.
        (Assignment(("0", "1", "2", "3"), ("4", "5", "6"), "7").held, 1, 8),
        (Assignment(("0", "1", "2"), ("4", "5", "6"), "6").held, 0, 6),
        # Of a cluster: with a GPU left for the evaluation, without one, and without any GPU.
        (HeldDevices.on_cluster(Cluster(generators=3, learner=Fsdp2(), trainers=4), there=8), 1, 8),
        (HeldDevices.on_cluster(Cluster(generators=3, learner=Fsdp2(), trainers=4), there=7), 0, 7),
        (HeldDevices.on_cluster(Cluster(generators=3, learner=Fsdp2(), trainers=4)), 0, 7),
        # Two verifiers that request half a GPU each.
        (HeldDevices.on_cluster(Cluster(verifiers=2, verifier=Resources(gpus=0.5)), there=9), 2, 4),
    ],
)
def test_a_gpu_that_only_evaluates_or_verifies_is_held_as_well(held, apart, whole):
    generators, trainers = (3, whole - apart - 3) if whole > 4 else (1, 1)
    counters = RunCounters(generators, trainers, held, apart=True)
    counters.add(step_of(1800, 0), Counters(seconds=900, held=generators * 3600), wall_seconds=3600)
    counters.add_evaluation(3000, 0)
    assert held.apart == apart
    assert gpu_hours(counters) == pytest.approx(whole)


def test_an_evaluation_on_half_of_a_generators_gpu_is_half_a_device():
    held = HeldDevices.on_cluster(Cluster(generators=3, learner=Fsdp2(), trainers=4), there=7)
    assert (held.generator, held.evaluator) == (1, 0.5)


def test_a_shared_device_is_counted_once():
    """A trainer and two generators on one GPU: each has a third of it, whichever of them works."""
    held = Assignment(("0",), ("0", "0"), "0").held
    counters = RunCounters(2, 1, held, apart=True)
    counters.add(step_of(3600, 0), Counters(seconds=7200, held=7200), wall_seconds=3600)
    assert gpu_hours(counters) == pytest.approx(1)
    assert counters.idle_seconds == pytest.approx(0)


def test_five_generators_on_two_devices_are_two():
    held = Assignment(("0",), ("1", "2", "1", "2", "1"), "2").held
    counters = RunCounters(5, 1, held, apart=True)
    counters.add(step_of(0, 0), Counters(held=5 * 3600), wall_seconds=3600)
    assert gpu_hours(counters) == pytest.approx(3)


def test_devices_of_the_past_stay_those_that_there_were():
    """A resume on servers of other tensor parallelism counts what comes from then on by theirs."""
    counters = RunCounters(1, 1, HeldDevices(generator=4), apart=True)
    counters.add(step_of(0, 0), Counters(held=3600), wall_seconds=3600)
    resumed = RunCounters(1, 2, HeldDevices(generator=2), apart=True)
    resumed.restore(counters.state())
    resumed.add(step_of(0, 0), Counters(held=7200), wall_seconds=3600)
    assert gpu_hours(resumed) == pytest.approx(4 + 1 + 2 + 2)


def test_roles_that_take_turns_hold_one_device():
    counters = RunCounters()
    counters.add(step_of(1000, 0), Counters(seconds=2000), wall_seconds=3600)
    assert gpu_hours(counters) == pytest.approx(1)
    assert counters.idle_seconds == pytest.approx(600)
    assert counters.devices == {"generate": 0, "train": 1, "evaluate": 1}
