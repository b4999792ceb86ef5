"""Texts that end a completion."""

from dataclasses import replace

import numpy as np
import pytest
from byte_model import save_byte_model

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.engine.build import load_generator
from scalerl.rl.model.causal_lm import load_tokenizer, stop_tokens
from scalerl.rl.types import Prompt
from scalerl.rl.verify.verifier import texts_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return from_dict(
        {
            "model": str(save_byte_model(tmp_path_factory.mktemp("bytes"))),
            "task": {"kind": "reasoning_gym", "name": "gcd", "size": 4, "heldout": 2},
            "budget": {"kind": "steps", "amount": 1},
            "context": {"prompt": 20, "thinking": 100, "answer": 100},
            "length": {"kind": "none"},
        }
    )


def completions(recipe):
    generator = load_generator(recipe, recipe.model, 0, 8)
    for i in range(4):
        generator.submit(Prompt(f"p/{i}", "ab", ""), 0, 4)
    return [rollout for group in generator.collect(4) for rollout in group]


def test_a_completion_ends_with_the_first_token_that_begins_with_a_stop(recipe):
    stopped = replace(recipe, stop=("e", "\n"))
    tokenizer = load_tokenizer(recipe.model)
    ends = set(stop_tokens(tokenizer, stopped.stop))
    assert ends == set(tokenizer("e\n")["input_ids"])
    free, cut = completions(recipe), completions(stopped)
    assert sum(bool(ends & set(r.token_T.tolist())) for r in free) > 3  # random bytes have some
    for whole, part in zip(free, cut, strict=True):  # the same random numbers
        at = np.flatnonzero(np.isin(whole.token_T, list(ends)))
        n = at[0] + 1 if len(at) else len(whole.token_T)
        assert part.token_T.tolist() == whole.token_T[:n].tolist()
        assert part.truncated == (whole.truncated and not len(at))
        if len(at):
            assert texts_of(tokenizer, [(part.prompt, part.turns)])[0][0].endswith(("e", "\n"))


def test_a_stop_that_no_token_begins_with_is_refused(recipe):
    with pytest.raises(InputError, match=r"stop: no token of .* begins with 'ab'"):
        load_generator(replace(recipe, stop=("ab",)), recipe.model, 0, 8)
    with pytest.raises(InputError, match="stop: an empty text"):
        from_dict({**recipe.to_dict(), "stop": [""]})
