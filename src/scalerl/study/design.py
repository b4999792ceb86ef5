"""Two-level fractional factorials: which switches are on in which run, and what cannot be told apart.

A design of 2^m runs gives every factor a column: a number from 1 to 2^m - 1, whose bits say which of the m
basic factors it is the product of. Factor c is on in run r where r & c has an odd number of bits: so all are
off in run 0, and columns multiply by exclusive or. A set of factors whose columns come to 0 is a word of the
defining relation; the length of the shortest word is the resolution (Box and Hunter, Technometrics 3, 1961).

    resolution 4    no two and no three columns come to 0: main effects are free of two-way interactions
    resolution 5    nor do four: two-way interactions are free of one another as well
    full            every combination: free of everything

With levels 0 and 1 the words of even length all have the sign +, so that interactions of one chain add up. Of
the designs of resolution 4 up to 16 factors these have as few words of every length as the published ones of
minimum aberration (Chen, Sun and Wu, International Statistical Review 61, 1993).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from scalerl.errors import InputError

Resolution = Literal[4, 5, "full"]
MOST_RUNS = 128
"""No study has more arms."""


def columns(factors: int, resolution: Resolution) -> tuple[int, tuple[int, ...]]:
    """(m, the column of every factor) of the smallest regular design of that resolution, or of a higher one.

    Resolution 4 exists exactly where factors <= 2^(m - 1): columns with an odd number of bits have no words
    of odd length, and no more than half of all columns can have none of length three. Resolution 5 is
    searched for, from the smallest m up, and exhaustively.

    Raises:
        InputError: no factors, or a design of more than `MOST_RUNS` runs.
    """
    if factors < 1:
        raise InputError("arms.switches: a factorial needs one switch at least")
    # No more than 2^(m - 1) columns: above them there are words of three letters.
    fewest = factors if resolution == "full" else (2 * factors - 1).bit_length()
    for m in range(fewest, MOST_RUNS.bit_length()):
        found = _greedy(factors, m) if resolution == 4 else _search(factors, m)
        if found is not None:
            return m, found
    raise InputError(f"arms: {factors} switches at resolution {resolution} take more than {MOST_RUNS} arms")


def levels(m: int, columns_F: Sequence[int]) -> list[list[int]]:
    """For every run the level of every factor: 0 is off, 1 is on. The first run has all off."""
    return [[(run & column).bit_count() % 2 for column in columns_F] for run in range(2**m)]


def words(columns_F: Sequence[int]) -> list[tuple[int, ...]]:
    """The defining contrast subgroup without its identity: every set of factors whose columns come to 0.

    Their number is 2^(factors - m) - 1; they are made as all products of generators.
    """
    pivots: dict[int, tuple[int, int]] = {}  # leading bit -> (reduced column, the factors it is made of)
    generators = []
    for place, column in enumerate(columns_F):
        made_of = 1 << place
        while column and column.bit_length() in pivots:
            other, others = pivots[column.bit_length()]
            column, made_of = column ^ other, made_of ^ others
        if column:
            pivots[column.bit_length()] = column, made_of
        else:
            generators.append(made_of)
    group = [0]
    for generator in generators:
        group += [word ^ generator for word in group]
    return [tuple(place for place in range(len(columns_F)) if word >> place & 1) for word in group[1:]]


def resolution_of(columns_F: Sequence[int]) -> int | None:
    """Length of the shortest word; None where there is none, as in a full factorial."""
    return min((len(word) for word in words(columns_F)), default=None)


def alias_chains(columns_F: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The two-way interactions that share a column, chain by chain, those alone in theirs too."""
    chains: dict[int, list[tuple[int, int]]] = {}
    for a, b in itertools.combinations(range(len(columns_F)), 2):
        chains.setdefault(columns_F[a] ^ columns_F[b], []).append((a, b))
    return list(chains.values())


def _basis(m: int) -> list[int]:
    return [1 << bit for bit in range(m)]


def _greedy(factors: int, m: int) -> tuple[int, ...]:
    """Columns of resolution 4 or more, each chosen for the fewest words of length 4.

    Where that leads into a dead end, among those with an odd number of bits, which never does.
    """
    for candidates in (range(1, 2**m), [c for c in range(1, 2**m) if c.bit_count() % 2]):
        chosen = _basis(m)[:factors]
        while len(chosen) < factors:
            sums = {a ^ b for a, b in itertools.combinations(chosen, 2)}
            triples = Counter(a ^ b ^ c for a, b, c in itertools.combinations(chosen, 3))
            free = [c for c in candidates if c not in chosen and c not in sums]
            if not free:
                break
            chosen.append(min(free, key=lambda c: (triples[c], c)))
        else:
            return tuple(chosen)
    raise AssertionError(f"{factors} columns of odd weight among 2^{m}")  # never: see `columns`


def _search(factors: int, m: int) -> tuple[int, ...] | None:
    """Columns without words of four letters or fewer, by exhaustive search over rising columns, or None."""
    found = next(_extended(_basis(m)[:factors], factors, 2**m, 1), None)
    return None if found is None else tuple(found)


def _extended(chosen: list[int], factors: int, end: int, start: int) -> Iterator[list[int]]:
    """Every way to go on to so many factors."""
    if len(chosen) == factors:
        yield chosen
        return
    pairs = {a ^ b for a, b in itertools.combinations(chosen, 2)}
    taken = {*chosen, *pairs, *(c ^ pair for c in chosen for pair in pairs)}
    free = [column for column in range(start, end) if column not in taken]
    if len(free) < factors - len(chosen):
        return
    for column in free:
        yield from _extended([*chosen, column], factors, end, column + 1)
