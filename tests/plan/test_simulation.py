"""The simulation against cases worked by hand, and what must hold whatever the rates."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from scalerl.errors import InputError
from scalerl.plan.bounds import TokenCounts, bounds, train_seconds
from scalerl.plan.job import Lengths, PlannedEvaluations, PlannedJob, Truncation
from scalerl.plan.rates import (
    Decode,
    DriverRates,
    Rates,
    Trainer,
    Verify,
    WeightRates,
)
from scalerl.plan.simulate import Simulation, simulate
from scalerl.plan.split import best, splits
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL

TEN = Lengths(mean=10, p95=10, prompt=3)
SECOND = Rates(decode=Decode(1.0), trainer=Trainer(0.0, fixed=5.0), lengths=TEN)
"""A decode step takes a second, a trainer step five, and every completion has ten tokens."""
LONG = Truncation(10**6)


def job(schedule, prompts=4, samples=2, rows=8):
    return PlannedJob(prompts, samples, rows, schedule, LONG)


def test_on_policy_the_roles_take_turns():
    found = simulate(job(PipelineRL(0)), SECOND, 1, 1)
    assert found.seconds_per_step == pytest.approx(10 + 5)
    assert found.generators_idle == pytest.approx(5 / 15)
    assert found.slots_in_use == pytest.approx(10 / 15)
    assert found.trainers_train == pytest.approx(5 / 15)
    assert found.wait_for_groups == pytest.approx(10 / 15)
    assert found.staleness_histogram == (1.0,)


def test_every_cost_of_the_loop_is_in_the_step():
    rates = replace(
        SECOND,
        decode=Decode(0.5, slot=0.25, position=0.01, prompt=0.1),
        verify=Verify(0.5, workers=2),
        driver=DriverRates(completion=0.02, step=0.7),
        weights=WeightRates(publish=0.3, send=2.1, update=0.6),
        trainer=Trainer(0.01, fixed=5.0),
    )
    found = simulate(job(PipelineRL(0)), rates, 1, 1)
    # 8 rows attend to 3 positions at first, and to one more each step.
    decode = 10 * (0.5 + 0.25 * 8) + 0.01 * sum(8 * (3 + t) for t in range(10)) + 4 * 3 * 0.1
    verify, batch, train = 8 * 0.5 / 2, 8 * 0.02, 5 + 80 * 0.01
    # The weights are sent and updated while the driver records.
    weights = 0.3 + 2.1 + 0.6
    assert found.seconds_per_step == pytest.approx(decode + verify + batch + train + weights)
    assert found.wait_for_driver == pytest.approx((batch + 0.3 + 0.7) / found.seconds_per_step)


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


def test_an_overlapped_driver_works_while_the_trainer_steps():
    rates = replace(
        SECOND, decode=Decode(0.1), verify=Verify(0.5), driver=DriverRates(completion=0.2, step=0.7)
    )
    plain = simulate(job(PipelineRL(4)), rates, 4, 1)
    assert plain.seconds_per_step == pytest.approx(5 + 8 * 0.5 + 8 * 0.2 + 0.7)
    rates = replace(rates, driver=replace(rates.driver, overlapped=True))
    found = simulate(job(PipelineRL(4)), rates, 4, 1)
    # What is left between two steps is the record.
    assert found.seconds_per_step == pytest.approx(5 + 0.7)
    assert found.wait_for_verification == 0
    assert found.staleness_max <= 4
    same = simulate(replace(job(PipelineRL(4)), overlapped=True), rates, 4, 1)
    assert same.to_json() == found.to_json()
    # On-policy there is nothing to overlap with.
    on_policy = simulate(job(PipelineRL(0)), rates, 4, 1)
    assert on_policy.seconds_per_step == pytest.approx(1 + 8 * 0.7 + 5 + 0.7)


def test_random_lengths_come_to_the_closed_form_where_generation_bounds():
    rates = replace(
        SECOND,
        decode=Decode(1.0, slot=0.1),
        lengths=Lengths(mean=40, p95=90, within=0.4),
        trainer=Trainer(0.0, 1.0),
    )
    found = simulate(job(PipelineRL(20), prompts=16, samples=4, rows=8), rates, 2, 1, steps=200)
    # 16 rows give a token each in 1.8 s, and a batch has 64 completions of 40 tokens.
    assert found.seconds_per_step == pytest.approx(64 * 40 * 1.8 / 16, rel=0.02)
    assert found.at_least["generation"] == pytest.approx(64 * 40 * 1.8 / 16, rel=0.02)
    assert found.slots_in_use > 0.99


def test_more_trainers_share_the_tokens():
    rates = replace(SECOND, trainer=Trainer(1.0), lengths=TEN)
    one, four = (simulate(job(PipelineRL(4)), rates, 64, m) for m in (1, 4))
    assert one.seconds_per_step == pytest.approx(80)
    assert four.seconds_per_step == pytest.approx(20)
    assert train_seconds(rates, 2, 11, 9) == 9  # no more than one trainer has a completion


def test_off_policy_takes_turns_by_phases_and_ages_are_alike():
    found = simulate(job(OffPolicy(4)), SECOND, 1, 1)
    assert found.seconds_per_step == pytest.approx((4 * 10 + 4 * 5) / 4)
    assert found.generators_idle == pytest.approx(4 * 5 / 60)
    assert found.staleness_histogram == pytest.approx((0.25, 0.25, 0.25, 0.25))


def random_rates(seed):
    rng = np.random.default_rng(seed)
    return Rates(
        decode=Decode(*rng.uniform(0, [1, 0.1, 1e-3, 0.1])),
        trainer=Trainer(rng.uniform(0, 0.1), rng.uniform(0, 20), used=0.7),
        lengths=Lengths(mean=20, p95=60, within=0.5, prompt=4),
        verify=Verify(rng.uniform(0, 0.1)),
        driver=DriverRates(rng.uniform(0, 0.05), 1.0, overlapped=bool(rng.integers(2))),
        weights=WeightRates(0.1, *rng.uniform(0, 5, 2)),
        evaluate=30.0,
    )


@pytest.mark.parametrize(
    "schedule", [PipelineRL(0), PipelineRL(1), PipelineRL(5), OffPolicy(1), OffPolicy(3)]
)
@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_older_and_no_step_faster_than_it_can_be(schedule, seed):
    asked = replace(job(schedule, prompts=3, samples=4, rows=5), evaluations=PlannedEvaluations(4))
    found = simulate(asked, random_rates(seed), 3, 2, seed=seed, steps=400)
    assert found.staleness_max <= schedule.max_staleness
    assert sum(found.staleness_histogram) == pytest.approx(1)
    assert 0 <= found.generators_idle <= 1
    assert 0 < found.slots_in_use <= 1
    waits = found.wait_for_groups + found.wait_for_verification + found.wait_for_driver
    assert found.trainers_train + waits + found.wait_for_evaluation == pytest.approx(1)
    slower = {what: s for what, s in found.at_least.items() if s > 1.03 * found.seconds_per_step}
    assert not slower  # but for chance


def test_the_largest_age_is_reached_where_the_trainer_is_slow():
    rates = replace(SECOND, trainer=Trainer(0.0, fixed=50.0), driver=DriverRates(step=0.5))
    assert simulate(job(PipelineRL(3), rows=64), rates, 4, 1).staleness_max == 3


def test_weights_that_arrive_after_the_driver_has_looked_admit_a_step_later():
    """The driver admits only where it collects: a trainer that never waits has a lead of one less."""
    rates = replace(SECOND, trainer=Trainer(0.0, fixed=50.0), weights=WeightRates(update=1.0))
    found = simulate(job(PipelineRL(3), rows=64), rates, 4, 1)
    assert found.wait_for_groups == 0
    assert found.staleness_max == 2


def test_groups_come_in_order_so_that_one_long_completion_is_waited_for():
    loop = Simulation(job(PipelineRL(1), prompts=2, samples=1, rows=4), SECOND, 1, 1, 0)
    loop._lengths = deque([[100], *[[10]] * 40])
    loop.run(1, lambda done: None)
    # The others are complete after 10 s, and nothing is trained until the first one is.
    assert loop.now == pytest.approx(100 + 5)
    assert loop.totals.seconds["groups"] == pytest.approx(100)
    assert loop.totals.generated == 2


def test_a_straggler_bounds_the_step_by_its_own_decode_steps():
    """With one slot for every completion the longest decides, and k + 1 batches share its time."""
    few = replace(SECOND, decode=Decode(1.0), trainer=Trainer(0.0, 1.0))
    least = bounds(job(PipelineRL(3), rows=64), few, 4, 1)
    assert least["in order"] == pytest.approx((10 + 1) / 4, rel=1e-3)
    assert simulate(job(PipelineRL(3), rows=64), few, 4, 1).seconds_per_step >= least["in order"] - 1e-9


@pytest.mark.parametrize("schedule", [PipelineRL(2), OffPolicy(2)])
def test_admitted_is_consumed_and_in_flight(schedule):
    rates = replace(SECOND, lengths=Lengths(mean=20, p95=50), weights=WeightRates(update=1.0))
    loop, looked = Simulation(job(schedule), rates, 3, 1, 0), []
    go_on = loop._go

    def balanced():
        """Between any two events every group is in one place."""
        go_on()
        looked.append(loop.now)
        under_way = sum(group.left > 0 for group in loop._order)
        assert loop._in_flight.sum() == under_way
        assert loop.admitted - loop._version * 4 <= schedule.in_flight_limit(4) + 4 * schedule.max_staleness
        assert loop.admitted <= loop._updated * 4 + schedule.in_flight_limit(4)

    loop._go = balanced
    loop.run(20, lambda done: None)
    assert len(looked) > 150
    assert sum(loop.totals.staleness.values()) == pytest.approx(loop.totals.tokens)


def test_weights_are_sent_one_version_after_the_other():
    rates = replace(SECOND, weights=WeightRates(send=40.0))
    assert simulate(job(PipelineRL(0)), rates, 1, 1).seconds_per_step == pytest.approx(10 + 5 + 40)
    assert simulate(job(PipelineRL(8)), rates, 1, 1).seconds_per_step == pytest.approx(40, rel=0.01)


def test_training_waits_where_evaluations_come_faster_than_they_are_made():
    asked = replace(job(PipelineRL(0)), evaluations=PlannedEvaluations(2))

    def seconds(of_one):
        return simulate(asked, replace(SECOND, evaluate=of_one), 1, 1, steps=80)

    assert seconds(8.0).seconds_per_step == pytest.approx(15)
    assert seconds(100.0).seconds_per_step == pytest.approx(50, rel=0.05)
    assert seconds(100.0).wait_for_evaluation == pytest.approx(0.7, abs=0.03)


def test_generators_that_evaluate_sample_nothing_else_meanwhile():
    asked = replace(job(PipelineRL(0)), evaluations=PlannedEvaluations(2, by_generators=True))

    def seconds(of_one, generators):
        return simulate(asked, replace(SECOND, evaluate=of_one), generators, 1, steps=80).seconds_per_step

    assert seconds(100.0, 1) - seconds(0.0, 1) == pytest.approx(100 / 2)
    assert seconds(100.0, 2) - seconds(0.0, 2) == pytest.approx(100 / 2 / 2)


@pytest.mark.parametrize(
    ("by_generators", "expected"), [(False, 16 * 10 / 8 + 4 * 3 * 0.5), (True, 8 * 10 / 8 + 2 * 3 * 0.5)]
)
def test_an_evaluation_takes_what_its_completions_take_to_decode(by_generators, expected):
    rates = replace(SECOND, decode=Decode(1.0, prompt=0.5))
    asked = replace(job(PipelineRL(0)), evaluations=PlannedEvaluations(5, 4, 4, 8, by_generators))
    assert simulate(asked, rates, 2, 1).evaluation_seconds == pytest.approx(expected)
    assert simulate(asked, replace(rates, evaluate=9.0), 2, 1).evaluation_seconds == 9 / (1 + by_generators)
    # The longest completion: with a slot for each there is nothing else.
    alone = replace(asked, evaluations=PlannedEvaluations(5, 1, 1, 8, by_generators))
    assert simulate(alone, SECOND, 2, 1).evaluation_seconds == pytest.approx(10)


@pytest.mark.parametrize("k", [0, 8])
def test_evaluations_that_are_rare_count_in_few_steps(k):
    def seconds(seldom, of_one, by_generators):
        asked = PlannedEvaluations(seldom, by_generators=by_generators)
        rates = replace(SECOND, evaluate=of_one)
        return simulate(replace(job(PipelineRL(k)), evaluations=asked), rates, 1, 1).seconds_per_step

    without = seconds(100, 0.0, True)
    assert seconds(100, 5000.0, True) == pytest.approx(without + 50, rel=0.05)
    assert seconds(100, 5000.0, False) == pytest.approx(50, rel=0.12)
    assert seconds(1e9, 5000.0, False) == pytest.approx(without, rel=1e-3)


def test_the_best_split_is_where_both_roles_are_busy():
    rates = replace(SECOND, decode=Decode(1.0), trainer=Trainer(0.5))
    # Generation takes 80 s of a generator of one slot; training, 40 s of a trainer.
    found = splits(job(PipelineRL(4), prompts=8, samples=8, rows=8), rates, 9)
    assert [one.trainers for one in found] == list(range(1, 9))
    assert best(found).trainers == 7
    assert all(one.devices == 9 for one in found)
    shares = []
    many = splits(job(PipelineRL(4), prompts=8, samples=8, rows=8), rates, 60, steps=20, watch=shares.append)
    assert len(many) < 10
    assert shares == sorted(shares)
    assert shares[-1] == 1
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


def test_counts_of_tokens_are_those_of_the_draws():
    counts = TokenCounts.of(job(PipelineRL(0)), SECOND)
    assert (counts.completion, counts.longest) == (10, 10)
    assert counts.context == pytest.approx(3 + 4.5)  # 3 to 12, each once


@pytest.mark.parametrize(
    "values",
    [
        {"mean": 0, "p95": 0},
        {"mean": 5, "p95": 2},
        {"mean": 5, "p95": 50},
        {"mean": 5, "p95": 9, "within": 2},
    ],
)
def test_lengths_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match=r"p95|within"):
        Lengths(**values)
