"""What is made of a completion all at once, against the rule of the built-in generator, token by token."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from scalerl.errors import WorkerError
from scalerl.rl.algo.length import LengthRule, LengthState, Marker
from scalerl.rl.engine.vllm.completions import follow
from scalerl.rl.engine.vllm.protocol import rule_from_json, rule_to_json

END = 0
LETTERS = ".ab<>/t-"


def decode(tokens):
    return "".join(LETTERS[token] for token in tokens)


ONE = Marker((5,))
SEVERAL = Marker((3, 4), "<>", frozenset({4}), decode)
RULES = [
    LengthRule(8, 5, ONE, (6, 5), (2, 8)),
    LengthRule(8, 5, SEVERAL, (6, 3, 4), (2, 8)),
    LengthRule(8, 5, ONE),
]


def one_by_one(rule, token_T, interrupt_at, ends):
    """Tokens as a server that follows the rule returns them, from what its model says; and what they are."""
    state = LengthState(rule, 1)
    state.start(0, interrupt_at)
    written, forced = [], []
    for token in token_T:
        must = int(state.forced_token()[0])
        written.append(token if must < 0 else must)
        forced.append(must >= 0)
        done_R, truncated_R = state.advance(np.array(written[-1:]), ends)
        if done_R[0]:
            return written, forced, bool(truncated_R[0])
    raise AssertionError("the rule has no end")


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 7), min_size=20, max_size=20),
    st.integers(2, 8),
    st.sampled_from([(END,), (END, 7), (END, 2, 7)]),
)
def test_a_completion_is_followed_as_the_built_in_generator_would(rule, token_T, interrupt_at, ends):
    written, forced, truncated = one_by_one(rule, token_T, interrupt_at, ends)
    for after in ([], [7], [END, 7]):  # where it was truncated, a server writes one more to end it
        if after and not truncated:
            continue
        n, span, cut = follow(rule, np.array(written + after), interrupt_at, ends)
        assert (n, cut) == (len(written), truncated)
        assert np.flatnonzero(forced).tolist() == list(range(span.start, min(span.stop, n)))


def test_what_does_not_follow_the_rule_is_refused():
    rule = RULES[0]
    with pytest.raises(WorkerError, match=r"did not end the thinking at token 3.*--logits-processors"):
        follow(rule, np.array([1, 2, 1, 2, 1, 2, 0]), 3, (END,))
    with pytest.raises(WorkerError, match="ended a completion after 4 tokens"):
        follow(rule, np.array([1, 5, 2, 2]), 3, (END,))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_goes_to_the_server_and_back(rule):
    there = rule_from_json(rule_to_json(rule), decode)
    assert (there.thinking, there.answer, there.phrase) == (rule.thinking, rule.answer, rule.phrase)
    assert there.end_of_thinking == rule.end_of_thinking
