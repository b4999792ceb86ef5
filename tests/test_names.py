"""Names as folders, and nested objects as one."""

import pytest

from scalerl.errors import InputError
from scalerl.files import folder_name
from scalerl.jsonl import flat
from scalerl.view.table import changes_in_words


def test_names_become_names_of_folders():
    assert folder_name("model=/data/a b") == "model=_data_a_b"
    assert folder_name("..") == "_"
    assert folder_name("../", empty="run") == "run"
    long = [folder_name("\u00e9" * 120 + end) for end in "ab"]  # two bytes each
    assert long[0] != long[1]
    assert all(len(name.encode()) < 120 for name in long)


def test_nested_objects_keep_their_order_as_one():
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {}}
    assert list(flat(nested).items()) == [("a.b", 1), ("a.c.d", 2), ("e", 3)]
    assert list(flat(nested, "x.", "/")) == ["x.a/b", "x.a/c/d", "x.e"]
    assert changes_in_words({"loss": {"kind": "dapo", "low": 0.2}, "decode_slots": 3}) == (
        "loss.kind = dapo, loss.low = 0.2, decode_slots = 3"
    )


def nested(levels):
    value = {"n": 1}
    for _ in range(levels - 1):
        value = {"n": value}
    return value


def test_nesting_is_bounded_by_a_limit_and_not_by_the_stack():
    assert flat(nested(100)) == {".".join("n" * 100): 1}
    with pytest.raises(InputError, match="101 levels of nesting, and the limit is 100"):
        flat(nested(5000))
