"""The simulation against cases worked by hand, and what must hold whatever the rates."""

from dataclasses import replace

import numpy as np
import pytest

from scalerl.errors import InputError
from scalerl.plan.broadcast import arrivals
from scalerl.plan.clock import Clock
from scalerl.plan.driver import SimulatedDriver, largest_share
from scalerl.plan.job import PlannedJob
from scalerl.plan.lengths import Lengths, Truncation
from scalerl.plan.rates import (
    Decode,
    DriverRates,
    EvaluateRates,
    Machine,
    Prefill,
    Rates,
    Trainer,
    Verify,
    Weights,
)
from scalerl.plan.simulate import simulate
from scalerl.plan.split import best, splits
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL

TEN = Lengths(quantiles=(10.0, 10.0), prompt=3)
SECOND = Rates(decode=Decode(1.0), trainer=Trainer(0.0, fixed=5.0), lengths=TEN)
"""A decode step takes a second, a trainer step five, and every completion has ten tokens."""
LONG = Truncation(10**6)


def job(schedule, prompts=4, samples=2, rows=8):
    return PlannedJob(prompts, samples, rows, schedule, LONG)


def test_on_policy_the_roles_take_turns():
    found = simulate(job(PipelineRL(0)), SECOND, 1, 1)
    assert found.seconds_per_step == pytest.approx(10 + 5)
    assert found.generators_idle == pytest.approx(5 / 15)
    assert found.rows_in_use == pytest.approx(10 / 15)
    assert found.trainers_train == pytest.approx(5 / 15)
    assert found.wait_for_groups == pytest.approx(10 / 15)
    assert found.age_histogram == (1.0,)


def test_every_cost_of_the_loop_is_in_the_step():
    rates = replace(
        SECOND,
        decode=Decode(0.5, row=0.25, position=0.01),
        prefill=Prefill(0.1),
        verify=Verify(0.5, workers=2),
        driver=DriverRates(
            message=0.03,
            completion=0.01,
            token=0.001,
            group=0.2,
            generator=0.05,
            look=0.05,
            batch_token=0.02,
            step=0.7,
        ),
        weights=Weights(publish=0.3, install=0.6, gib=4.0, gib_per_second=2.0, latency=0.1, way="flat"),
        trainer=Trainer(0.01, fixed=5.0),
    )
    found = simulate(job(PipelineRL(0)), rates, 1, 1)
    # 8 rows attend to 3 positions at first, and to one more each step.
    decode = 10 * (0.5 + 0.25 * 8) + 0.01 * sum(8 * (3 + t) for t in range(10)) + 4 * 3 * 0.1
    taken = 0.03 + 8 * 0.01 + 80 * 0.001 + 0.05
    verify, batch, train = 8 * 0.5 / 2, 80 * 0.02, 5 + 80 * 0.01
    # The weights leave once they are published, and are there and installed while the driver has gone on.
    weights = 0.3 + 2.1 + 0.6
    heard = 0.03 + 0.05 + 4 * (0.2 + 0.05)  # the version is installed: a batch is admitted
    # Groups go out as they are admitted; the driver has done that before they are sampled.
    assert heard < decode
    assert found.seconds_per_step == pytest.approx(decode + taken + verify + batch + train + weights)


@pytest.mark.parametrize("k", [1, 8])
def test_with_a_lead_the_slower_role_sets_the_pace(k):
    generating = simulate(job(PipelineRL(k)), SECOND, 1, 1)
    assert generating.seconds_per_step == pytest.approx(10)
    assert generating.generators_idle == pytest.approx(0, abs=1e-9)
    assert generating.bound_by == "generation"
    rates = replace(SECOND, trainer=Trainer(0.0, fixed=25.0), driver=DriverRates(step=0.5))
    training = simulate(job(PipelineRL(k)), rates, 1, 1)
    assert training.seconds_per_step == pytest.approx(25.5)
    assert training.wait_for_groups == pytest.approx(0, abs=1e-9)
    assert training.bound_by == "training"


def test_workers_share_cores():
    clock, ended = Clock(cores=2), {}

    def end(name):
        ended[name] = clock.now

    for name, seconds in (("a", 1.0), ("b", 2.0)):
        clock.worker().work(seconds, end, name)
    third = clock.worker()
    stopped = third.work(2.5, end, "c")

    def other():
        third.cancel(stopped)
        clock.worker().work(0.5, end, "d")

    clock.at(2.5, other)
    clock.run(lambda: False)
    # The third shares a core with the first until both of the others are done at 2, and is stopped at 2.5.
    assert ended == pytest.approx({"a": 2.0, "b": 2.0, "d": 3.0})
    assert clock.held == pytest.approx(1 + 2 + 1.5 + 0.5)
    assert third.worked == pytest.approx(1.5)


def test_an_idle_core_takes_a_worker_from_one_that_is_shared():
    clock, ended = Clock(cores=2), {}
    for name, seconds in (("a", 1.0), ("b", 0.5), ("c", 2.0)):
        clock.worker().work(seconds, lambda name=name: ended.setdefault(name, clock.now))
    clock.run(lambda: False)
    # From .5 on, when the first and the third have had .25 each, all have a core.
    assert ended == pytest.approx({"a": 0.5 + 0.75, "b": 0.5, "c": 0.5 + 1.75})


def test_who_always_works_keeps_a_core_and_those_who_begin_and_end_share_the_other():
    clock, rounds = Clock(cores=2), [0, 0]
    clock.worker().work(10.0, lambda: clock.at(clock.now, rounds.append, clock.now))

    def begin(i, worker):
        worker.work(0.5, end, i, worker)

    def end(i, worker):
        rounds[i] += 1
        clock.at(clock.now + 0.1, begin, i, worker)

    for i in (0, 1):
        begin(i, clock.worker())
    clock.run(lambda: len(rounds) > 2)
    assert rounds[2] == pytest.approx(10.0, abs=0.6)  # who came last shared with it once
    assert sum(rounds[:2]) == pytest.approx(10 / 0.5, abs=2)  # which is all that one core does


def test_cores_that_all_work_may_be_slower_and_others_have_an_even_part_of_each():
    slower, ended = Clock(cores=2, together=0.5, others=2.0), []
    slower.worker().work(1.0, lambda: ended.append(slower.now))
    slower.run(lambda: False)
    assert ended == pytest.approx([4.0])  # half of a core at half of its speed
    assert slower.held_by_others == pytest.approx(4 + 2)


def test_roles_that_share_a_core_take_as_long_as_all_of_them_together():
    def pace(k, cores, generators=1):
        rates = replace(SECOND, machine=Machine(cores))
        return simulate(job(PipelineRL(k)), rates, generators, 1)

    assert pace(0, 1).seconds_per_step == pytest.approx(15)  # they take turns as it is
    assert pace(8, 1).seconds_per_step == pytest.approx(15)
    assert pace(8, 2).seconds_per_step == pytest.approx(10)
    three = pace(8, 2, generators=2)  # 20 s of decode steps and 5 of training in a batch of two rounds
    assert three.core_seconds_per_step == pytest.approx(three.seconds_per_step * 2, rel=0.02)
    assert three.generators_idle == pytest.approx(0, abs=0.02)


def test_what_a_generator_does_for_a_group_is_between_its_steps():
    rates = replace(SECOND, decode=Decode(1.0, group=0.5))
    found = simulate(job(PipelineRL(0)), rates, 1, 1)
    assert found.seconds_per_step == pytest.approx(10 + 4 * 0.5 + 5)
    assert found.generators_idle == pytest.approx(7 / 17)  # that is not generating


def test_an_overlapped_driver_works_while_the_trainer_steps():
    rates = replace(
        SECOND,
        decode=Decode(0.1),
        verify=Verify(0.5),
        driver=DriverRates(completion=0.1, batch_token=0.01, step=0.7),
    )
    plain = simulate(job(PipelineRL(4)), rates, 4, 1)
    assert plain.seconds_per_step == pytest.approx(5 + 8 * 0.5 + 8 * 0.1 + 80 * 0.01 + 0.7)
    rates = replace(rates, driver=replace(rates.driver, overlapped=True))
    found = simulate(job(PipelineRL(4)), rates, 4, 1)
    # What is left between two steps: the record, and the next batch.
    assert found.seconds_per_step == pytest.approx(5 + 80 * 0.01 + 0.7)
    assert found.wait_for_verification == 0
    assert found.age_max <= 4
    same = simulate(replace(job(PipelineRL(4)), overlapped=True), rates, 4, 1)
    assert same.to_json() == found.to_json()
    # On-policy there is nothing to overlap with.
    on_policy = simulate(job(PipelineRL(0)), rates, 4, 1)
    assert on_policy.seconds_per_step == pytest.approx(1 + 8 * 0.6 + 80 * 0.01 + 5 + 0.7)


def test_a_group_in_parts_is_sampled_by_several_generators():
    rates = replace(SECOND, trainer=Trainer(0.0, 1.0))
    few = job(PipelineRL(0), prompts=1, samples=8, rows=2)
    whole = simulate(few, rates, 4, 1)
    assert whole.seconds_per_step == pytest.approx(4 * 10 + 1)
    parts = simulate(few, replace(rates, driver=DriverRates(parts=4)), 4, 1)
    assert parts.seconds_per_step == pytest.approx(10 + 1)
    assert parts.tokens_per_second * parts.seconds_per_step == pytest.approx(80)
    assert parts.age_histogram == (1.0,)


def test_out_of_order_groups_grow_older_than_the_schedule_allows():
    rates = replace(SECOND, lengths=Lengths(mean=20, p95=70), trainer=Trainer(0.0, 1.0))
    asked = job(PipelineRL(2), prompts=8, samples=1, rows=4)
    ordered = simulate(asked, rates, 4, 1, steps=200)
    free = simulate(asked, replace(rates, driver=DriverRates(in_order=False)), 4, 1, steps=200)
    assert ordered.age_max == 2 < free.age_max
    assert free.seconds_per_step < ordered.seconds_per_step


def test_random_lengths_come_to_the_closed_form_where_generation_bounds():
    rates = replace(
        SECOND,
        decode=Decode(1.0, row=0.1),
        lengths=Lengths(mean=40, p95=90, within=0.4),
        trainer=Trainer(0.0, 1.0),
    )
    found = simulate(job(PipelineRL(20), prompts=16, samples=4, rows=8), rates, 2, 1, steps=200)
    # 16 rows give a token each in 1.8 s, and a batch has 64 completions of 40 tokens.
    assert found.seconds_per_step == pytest.approx(64 * 40 * 1.8 / 16, rel=0.02)
    assert found.rows_in_use > 0.99


def test_more_trainers_share_the_tokens():
    rates = replace(SECOND, trainer=Trainer(1.0), lengths=TEN)
    one, four = (simulate(job(PipelineRL(4)), rates, 64, m) for m in (1, 4))
    assert one.seconds_per_step == pytest.approx(80)
    assert four.seconds_per_step == pytest.approx(20)
    assert largest_share(np.array([9, 5, 4, 4]), 2) == 13
    assert largest_share(np.array([9, 1, 1]), 2) == 9  # no more than one trainer has a completion
    assert largest_share(np.array([], dtype=int), 3) == 0


def test_off_policy_takes_turns_by_phases_and_ages_are_alike():
    found = simulate(job(OffPolicy(4)), SECOND, 1, 1)
    assert found.seconds_per_step == pytest.approx((4 * 10 + 4 * 5) / 4)
    assert found.generators_idle == pytest.approx(4 * 5 / 60)
    assert found.age_histogram == pytest.approx((0.25, 0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    "schedule", [PipelineRL(0), PipelineRL(1), PipelineRL(5), OffPolicy(1), OffPolicy(3)]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_token_is_older_than_the_schedule_allows(schedule, seed):
    rng = np.random.default_rng(seed)
    rates = Rates(
        decode=Decode(rng.uniform(0.1, 1), rng.uniform(0, 0.1), rng.uniform(0, 1e-3)),
        trainer=Trainer(rng.uniform(0, 0.1), rng.uniform(0, 20), used=0.7),
        lengths=Lengths(mean=20, p95=60, within=0.5, prompt=4),
        prefill=Prefill(rng.uniform(0, 0.1), once=bool(rng.integers(2))),
        verify=Verify(rng.uniform(0, 0.1)),
        driver=DriverRates(completion=rng.uniform(0, 0.05), group=0.01, generator=1e-3, step=1.0),
        weights=Weights(0.1, rng.uniform(0, 5), 1.0, rng.uniform(0.1, 2), 0.01, way="flat"),
        evaluate=EvaluateRates(30.0, ("aside", "generators", "trainer")[seed]),
    )
    asked = replace(job(schedule, prompts=3, samples=4, rows=5), evaluate_every=4)
    found = simulate(asked, rates, 3, 2, seed=seed, steps=60)
    assert found.age_max <= schedule.max_age
    assert sum(found.age_histogram) == pytest.approx(1)
    assert 0 <= found.generators_idle <= 1
    assert 0 < found.rows_in_use <= 1
    waits = found.wait_for_groups + found.wait_for_verification + found.wait_for_driver
    assert found.trainers_train + waits + found.wait_for_evaluation == pytest.approx(1, abs=0.05)


def test_the_largest_age_is_reached_where_the_trainer_is_slow():
    rates = replace(SECOND, trainer=Trainer(0.0, fixed=50.0), driver=DriverRates(step=0.5))
    assert simulate(job(PipelineRL(3), rows=64), rates, 4, 1).age_max == 3


def test_weights_that_are_installed_after_the_driver_has_looked_admit_a_step_later():
    """The driver admits only where it collects: a trainer that never waits has a lead of one less."""
    rates = replace(SECOND, trainer=Trainer(0.0, fixed=50.0), weights=Weights(install=1.0))
    found = simulate(job(PipelineRL(3), rows=64), rates, 4, 1)
    assert found.wait_for_groups == 0
    assert found.age_max == 2


def test_groups_come_in_order_so_that_one_long_completion_is_waited_for():
    straggler = Lengths(quantiles=(10.0, 10.0))
    clock = Clock()
    driver = SimulatedDriver(
        job(PipelineRL(1), prompts=2, samples=1, rows=4),
        replace(SECOND, lengths=straggler),
        1,
        1,
        3,
        0,
        clock,
    )
    driver._lengths.extend([[100], [10], [10], [10], [10], [10], [10], [10]])
    driver.go()
    clock.run(lambda: len(driver.steps) == 1)
    # The others are complete after 10 s, and nothing is trained until the first one is.
    assert clock.now == pytest.approx(100 + 5)
    assert driver.steps[0].waited == pytest.approx(100)
    assert driver.steps[0].generated == 2


@pytest.mark.parametrize("schedule", [PipelineRL(2), OffPolicy(2)])
def test_admitted_is_consumed_and_in_flight(schedule):
    clock, looked = Clock(), 0
    rates = replace(SECOND, lengths=Lengths(mean=20, p95=50), weights=Weights(install=1.0))
    driver = SimulatedDriver(job(schedule), rates, 3, 1, 20, 0, clock)
    driver.go()

    def balanced():
        """Between any two events every group is in one place."""
        nonlocal looked
        looked += 1
        in_generators = sum(len(replica._order) + len(replica._done) for replica in driver.replicas)
        in_messages = sum(len(groups) for _, groups, _ in driver._inbox)
        in_messages += sum(len(args[1]) for *_, act, args in clock._events if act == driver.hear)
        in_flight = sum(driver._in_flight) // 2  # two completions each
        assert in_flight == in_generators + in_messages
        assert driver.admitted == driver.taken + in_flight + len(driver.queue)
        assert driver.admitted - driver.taken <= schedule.in_flight_limit(4)
        return False

    clock.run(balanced)
    assert looked > 200
    assert len(driver.steps) == 20
    assert driver.taken == 20 * 4
    assert all(sum(step.age_A) == step.tokens for step in driver.steps)


def test_weights_arrive_by_the_way_they_are_sent():
    sent = Weights(gib=8.0, gib_per_second=4.0, latency=0.5)
    at_R, sending = arrivals(sent, "flat", 3)
    assert at_R.tolist() == [2.5, 5.0, 7.5]
    assert sending == 7.5
    at_R, sending = arrivals(sent, "tree", 7)
    assert at_R.tolist() == [2.5, 5.0, 5.0, 7.5, 7.5, 7.5, 7.5]
    at_R, sending = arrivals(replace(sent, way="chain", pieces=4), "flat", 3)
    assert at_R.tolist() == [2.5, 3.5, 4.5]
    assert sending == 2.0


def test_weights_that_nodes_pass_on_take_as_long_as_the_first_round_and_one_link():
    sent = Weights(gib=8.0, gib_per_second=4.0, latency=0.01, pieces=8, way="spread")
    # 32 nodes ask for 8 pieces that 4 trainers have: each sends 8 GiB in 2 s; then 7 pieces by every link.
    at_R, sending = arrivals(sent, "flat", 32, 4)
    assert at_R.tolist() == pytest.approx([2 + 7 * 0.25 + 0.08] * 32)
    assert sending == at_R[0]
    on_nodes = arrivals(replace(sent, per_node=8), "flat", 32, 4)[0]
    assert on_nodes[0] == pytest.approx(0.25 + 7 * 0.25 + 0.08)
    large = arrivals(replace(sent, largest=4.0), "flat", 32, 4)[0]
    assert large[0] == pytest.approx(4.0 + 7 * 0.25 + 0.08)  # four ask who has it
    by_owners = arrivals(replace(sent, way="owners"), "flat", 32, 4)[0]
    assert by_owners[0] == pytest.approx(8 * 2 + 0.08)
    assert arrivals(replace(sent, way="recipe"), "flat", 4)[0].tolist() == pytest.approx(
        [2.01, 4.02, 6.03, 8.04]
    )


def test_who_evaluates_is_who_waits():
    asked = replace(job(PipelineRL(0)), evaluate_every=2)

    def pace(by):
        return simulate(
            asked, replace(SECOND, evaluate=EvaluateRates(8.0, by)), 1, 1, steps=40
        ).seconds_per_step

    assert pace("trainer") == pytest.approx(15 + 8 / 2)
    assert pace("generators") == pytest.approx(15 + 8 / 2)
    assert pace("aside") == pytest.approx(15)
    slow = replace(
        SECOND, evaluate=EvaluateRates(100.0)
    )  # beside the training, but one is not done before the next
    assert simulate(asked, slow, 1, 1, steps=80).seconds_per_step == pytest.approx(50, rel=0.05)


def test_the_best_split_is_where_both_roles_are_busy():
    rates = replace(SECOND, decode=Decode(1.0), trainer=Trainer(0.5))
    # Generation takes 80 s of a generator of one row; training, 40 s of a trainer.
    found = splits(job(PipelineRL(4), prompts=8, samples=8, rows=8), rates, 9)
    assert [one.trainers for one in found] == list(range(1, 9))
    assert best(found).trainers == 7
    assert all(one.devices == 9 for one in found)
    many = splits(job(PipelineRL(4), prompts=8, samples=8, rows=8), rates, 60, steps=20)
    assert len(many) < 10
    with pytest.raises(InputError, match="so 2 are needed"):
        splits(job(PipelineRL(4)), rates, 1)


def test_a_seed_gives_one_result():
    rates = replace(SECOND, lengths=Lengths(mean=30, p95=90))
    results = [simulate(job(PipelineRL(2)), rates, 2, 1, seed=s).to_json() for s in (0, 0, 1)]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("generators", "trainers", "steps"), [(0, 1, 5), (1, 0, 5), (1, 1, 0), (10**7, 1, 5)]
)
def test_numbers_out_of_range_are_refused(generators, trainers, steps):
    with pytest.raises(InputError, match="a number from 1 to 1000000"):
        simulate(job(PipelineRL(1)), SECOND, generators, trainers, steps=steps)


def test_lengths_have_their_mean_tail_and_cut():
    rng = np.random.default_rng(0)
    free_BG = Lengths(mean=500, p95=1500, within=0.3).draw(rng, 4000, 8, LONG)
    assert free_BG.mean() == pytest.approx(500, rel=0.05)
    assert np.quantile(free_BG, 0.95) == pytest.approx(1500, rel=0.08)
    within = np.log(free_BG).var(axis=1, ddof=1).mean() / np.log(free_BG).var()
    assert within == pytest.approx(0.3, abs=0.03)
    cut_BG = Lengths(mean=500, p95=1500, answer=20).draw(rng, 4000, 8, Truncation(900, (600, 800), 5))
    assert ((cut_BG > 600) & (cut_BG <= 825)).mean() == pytest.approx((free_BG > 700).mean(), abs=0.08)
    assert cut_BG.max() <= 825
    shown = Lengths(quantiles=(5.0, 10.0, 40.0)).draw(rng, 4000, 8, Truncation(30))
    assert shown.min() >= 5
    assert shown.max() == 30
    assert np.median(shown) == pytest.approx(10, abs=1)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mean": 5, "p95": 2},
        {"mean": 5, "p95": 50},
        {"quantiles": (3.0, 1.0)},
        {"mean": 5, "p95": 9, "within": 2},
    ],
)
def test_lengths_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match=r"quantiles|within"):
        Lengths(**values)


def test_the_decode_time_is_inverted():
    decode = Decode(0.5, 0.01, 1e-4)
    for steps in (1, 7, 400):
        assert decode.steps_in(decode.seconds(steps, 16, 900), 16, 900) == pytest.approx(steps)
