"""Configs of models in which something else stands where a number, a word or a table belongs."""

import json
import math

from hypothesis import strategies as st

DEEP = ("[" * 100_000, '{"a":' * 50_000, '{"hidden_size": 1' + "0" * 5000 + "}", "", "\x00", "{}", "[1]")
NUMBERS = [10**300, -(10**300), 10**12, 2**31, 10_000, 513, 1e308, -1e308, math.nan, math.inf, 0, -1, 0.5]
OTHERS = ["", "x", "32", "\n", "nan", None, True, False, [], {}, [1] * 9, ["a"], [[]], {"a": 1}]
ODD = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(OTHERS),
    st.integers(-3, 40),
    st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2), max_leaves=4),
)


def mutated(config):
    """The text of this config with values replaced, left out or put into a text part; or of no object."""
    keys = st.sampled_from(sorted(config))
    changes = st.dictionaries(keys, ODD, min_size=1, max_size=3)
    changed = changes.map(lambda found: config | found)
    without = st.sets(keys, min_size=1, max_size=3).map(
        lambda gone: {key: value for key, value in config.items() if key not in gone}
    )
    within = st.one_of(changes, ODD).map(lambda text: config | {"text_config": text})
    return st.one_of(st.one_of(changed, without, within, ODD).map(json.dumps), st.sampled_from(DEEP))
