"""Base models by name: what their options change, and what is refused."""

import pytest

from scalerl.errors import InputError
from scalerl.rl.model.demo_base import BaseModel, base_spec
from scalerl.rl.model.named import is_built
from scalerl.rl.tasks.chain import Chain, Demonstrations

TASK = Chain()


def test_options_of_a_name_are_the_models():
    plain = BaseModel(Demonstrations(TASK, 16))
    assert base_spec("chain-base", TASK, 16) == plain
    assert base_spec("chain-base:seed=0,thinking=16", TASK, 22) == plain  # whatever the recipe's budget
    other = base_spec("chain-base:seed=3,hidden_size=128,layers=4", TASK, 16)
    assert (other.seed, other.hidden_size, other.intermediate_size, other.layers) == (3, 128, 352, 4)
    assert len({plain.fingerprint, other.fingerprint, base_spec("chain-base", TASK, 22).fingerprint}) == 3


def test_only_its_own_name_is_built():
    assert is_built("chain-base")
    assert is_built("chain-base:seed=2")
    assert not is_built("Qwen/chain-base")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain-base:size=3", "no option 'size'; there are seed"),
        ("chain-base:layers=0", "layers must be a whole number of 1 or more, found '0'"),
        ("chain-base:layers", "layers must be a whole number of 1 or more, found ''"),
        ("chain-base:hidden_size=30", "hidden_size 30 is no multiple of 4 heads"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(InputError, match=message):
        base_spec(name, TASK, 16)
