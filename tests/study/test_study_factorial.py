"""Factorials: their resolution against the published designs, their arms, and arms combined."""

import itertools
import json
from collections import Counter

import pytest

from scalerl.errors import InputError
from scalerl.rl.algo.averaging import SampleAverage
from scalerl.rl.algo.loss import Cispo, Dapo, Grpo
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.recipe import load_recipe
from scalerl.study.arms import Factorial, LeaveOneOutArms, Listed, combine, expand
from scalerl.study.design import alias_chains, columns, levels, resolution_of, words


@pytest.fixture(scope="module")
def base():
    return load_recipe("demo")


SWITCHES = {
    "dapo": {"loss": {"kind": "dapo"}},
    "sample": {"averaging": {"kind": "sample"}},
    "k=2": {"schedule": {"k": 2}},
    "lr=1e-4": {"optimiser": {"lr": 1e-4}},
}

# Words by length, of the designs of minimum aberration: Chen, Sun and Wu (1993), tables 1-3; the smallest are
# also in Box, Hunter and Hunter, table 6.22.
PUBLISHED = [
    (4, 8, {4: 1}),
    (5, 16, {5: 1}),
    (6, 16, {4: 3}),
    (7, 16, {4: 7}),
    (8, 16, {4: 14, 8: 1}),
    (9, 32, {4: 6, 5: 8, 8: 1}),
    (10, 32, {4: 10, 5: 16, 8: 5}),
    (11, 32, {4: 25, 6: 27, 8: 10, 10: 1}),
    (16, 32, {4: 140, 6: 448, 8: 870, 10: 448, 12: 140, 16: 1}),
]


@pytest.mark.parametrize(("factors", "runs", "lengths"), PUBLISHED)
def test_resolution_4_has_the_words_of_the_published_designs(factors, runs, lengths):
    m, columns_F = columns(factors, 4)
    assert 2**m == runs
    assert Counter(map(len, words(columns_F))) == lengths


def test_half_fractions_are_the_textbooks():
    # 2^(4-1): D = ABC, so AB = CD, AC = BD and AD = BC. 2^(5-1): E = ABCD.
    assert columns(4, 4) == (3, (1, 2, 4, 7))
    assert alias_chains((1, 2, 4, 7)) == [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    assert words((1, 2, 4, 7)) == [(0, 1, 2, 3)]
    assert columns(5, 5) == (4, (1, 2, 4, 8, 15))
    assert len(alias_chains((1, 2, 4, 8, 15))) == 10


@pytest.mark.parametrize(("factors", "runs"), [(5, 16), (6, 32), (7, 64), (8, 64), (9, 128), (11, 128)])
def test_resolution_5_takes_as_many_runs_as_published(factors, runs):
    # Box, Hunter and Hunter, table 6.22, to 11 factors.
    m, columns_F = columns(factors, 5)
    assert (2**m, resolution_of(columns_F)) == (runs, 5)


@pytest.mark.parametrize(
    ("factors", "resolution"), [(3, 4), (7, 4), (8, 4), (10, 4), (6, 5), (8, 5), (4, "full")]
)
def test_columns_are_orthogonal_as_the_resolution_says(factors, resolution):
    """From the levels alone, without the algebra: products of columns of plus and minus one."""
    m, columns_F = columns(factors, resolution)
    x = [[2 * level - 1 for level in row] for row in levels(m, columns_F)]
    mains = [[row[f] for row in x] for f in range(factors)]
    pairs = [[row[a] * row[b] for row in x] for a, b in itertools.combinations(range(factors), 2)]

    def product(one, other):
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert all(sum(column) == 0 for column in mains)
    assert all(product(one, other) == 0 for one, other in itertools.combinations(mains, 2))
    assert all(product(main, pair) == 0 for main in mains for pair in pairs)
    alike = [product(one, other) for one, other in itertools.combinations(pairs, 2)]
    # Where two interactions are one column, their signs are the same: they add up.
    assert set(alike) <= ({0, 2**m} if resolution == 4 else {0})
    chains = [[(columns_F[a] ^ columns_F[b]) for a, b in chain] for chain in alias_chains(columns_F)]
    assert all(len(set(chain)) == 1 for chain in chains)
    assert sum(len(chain) * (len(chain) - 1) // 2 for chain in chains) == alike.count(2**m)


def test_switches_make_eight_arms_of_four(base):
    factorial = Factorial(SWITCHES)
    arms = {arm.name: arm.recipe for arm in expand(base, factorial)}
    assert list(arms)[:3] == ["base", "dapo+lr=1e-4", "sample+lr=1e-4"]
    assert len(arms) == 8
    on = arms["dapo+sample+k=2+lr=1e-4"]
    assert (on.loss, on.averaging, on.schedule, on.optimiser.lr) == (
        Dapo(),
        SampleAverage(),
        PipelineRL(2),
        1e-4,
    )
    assert arms["sample+k=2"].loss == base.loss == Cispo()
    design = factorial.design(base)
    assert json.loads(json.dumps(design)) == design
    assert design["factors"] == list(SWITCHES)
    assert list(design["levels"]) == list(arms)
    assert design["levels"]["base"] == [0, 0, 0, 0]
    assert design["levels"]["sample+lr=1e-4"] == [0, 1, 0, 1]
    assert design["aliases"][0] == [["dapo", "sample"], ["k=2", "lr=1e-4"]]


def test_the_switches_may_be_what_another_recipe_has(base):
    parts = ("loss", "averaging", "schedule")
    arms = expand(base, Factorial(without="deepseek_grpo", parts=parts))
    assert [arm.name for arm in arms][1] == "loss=grpo"
    assert arms[-1].name == "loss=grpo+averaging=sample+schedule=off_policy"
    assert len(arms) == 8
    # Nine parts of the other recipe differ: 32 arms.
    assert len(Factorial(without="deepseek_grpo").design(base)["levels"]) == 32


@pytest.mark.parametrize(
    ("factorial", "message"),
    [
        (Factorial(), "either switches or without"),
        (Factorial(SWITCHES, without="deepseek_grpo"), "either switches or without"),
        (Factorial(SWITCHES, parts=("loss",)), "go with without"),
        (Factorial({"a+b": {"rows": 2}}), "'a\\+b' cannot name a switch"),
        (
            Factorial({"a": {"loss": {"kind": "dapo"}}, "b": {"loss": {"max_ratio": 2.0}}}),
            "'a' and 'b' both change loss: one of them at a time",
        ),
        (
            Factorial({str(i): {"rows": i} for i in range(70)}),
            "70 switches at resolution 4 take more than 128",
        ),
        (Factorial({"same": {"loss": {"max_ratio": 5.0}}}), "arms 'base' and 'same' are the same recipe"),
        (Factorial({"a": {"los": {"kind": "dapo"}}}), "arm a: unknown key 'los'"),
    ],
)
def test_a_factorial_that_cannot_be_is_refused(base, factorial, message):
    with pytest.raises(InputError, match=message):
        expand(base, factorial)


def test_the_best_single_changes_combined(base):
    arms = {arm.name: arm for arm in expand(base, LeaveOneOutArms("deepseek_grpo"))}
    both = combine(base, [arms["loss=grpo"], arms["averaging=sample"]])
    assert both.name == "loss=grpo + averaging=sample"
    assert (both.recipe.loss, both.recipe.averaging) == (Grpo(), SampleAverage())
    assert both.recipe.schedule == base.schedule
    listed = expand(base, Listed({"a": {"optimiser": {"lr": 1e-4}}, "b": {"optimiser": {"warmup_steps": 3}}}))
    assert combine(base, listed[1:]).changes == {"optimiser": {"lr": 1e-4, "warmup_steps": 3}}


def test_what_cannot_be_combined_is_refused(base):
    listed = expand(base, Listed({"a": {"optimiser": {"lr": 1e-4}}, "b": {"optimiser": {"lr": 3e-4}}}))
    with pytest.raises(InputError, match=r"'a' and 'b' both change optimiser\.lr"):
        combine(base, listed[1:])
