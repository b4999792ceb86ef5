"""Families of curves of one's own, first that of docs/extend/family.md."""

import json

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC
from scalerl.own_code import load


def test_a_fit_with_a_family_of_curves(here, capsys):
    """With k = 1 it is the log-logistic curve; its data with a slow start speak for k = .3."""
    family = load("families.py:SlowStart")
    b, x = np.array([0.5, 1.0, 3.0]), np.array([-2.0, 0.0, 1.5])
    for found, expected in zip(family(k=1.0).slopes(b, x), LOG_LOGISTIC.slopes(b, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    compute = np.geomspace(20, 40_000, 40)
    rate = 0.1 + 0.5 * family().share(np.asarray(1.2), np.log(compute / 400))
    noisy = rate + 0.003 * np.random.default_rng(0).standard_normal(40)
    rows = zip([0.0, *compute], [0.1, *noisy], strict=True)
    (here / "log.csv").write_text("gpu_hours,pass_rate\n" + "".join(f"{c},{r}\n" for c, r in rows))
    assert main(["fit", "log.csv", "--family", "families.py:SlowStart", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["families"]["slow_start"] == max(answer["families"].values())
    lo, hi = answer["intervals"]["A"]
    assert lo < 0.6 < hi
    assert main(["fit", "log.csv", "--family", "families.py:SlowStart", "--sensitivity"]) == 0
    assert "slow_start 1.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Flat(Family): name: str = 'flat'", "must be a frozen dataclass"),
        (
            "@dataclass(frozen=True)\nclass Flat: name: str = 'flat'",
            "has no label, which the protocol Family",
        ),
        ("@dataclass(frozen=True)\nclass Flat(Family): pass", "every field needs a default"),
        (
            "@dataclass(frozen=True)\nclass Flat(LogLogistic):\n    name: str = 'flat'\n"
            "    def slopes(self, b, x):\n        share, by_b, by_c = super().slopes(b, x)\n"
            "        return share, by_c, by_b",
            "slopes has a wrong d share / d log B at B = ",
        ),
        *(
            (
                "@dataclass(frozen=True)\nclass Flat(LogLogistic):\n    name: str = 'flat'\n"
                f"    def inverse(self, b, share): {wrong}",
                f"family 'flat': its methods cannot be called with arrays ({error}",
            )
            for wrong, error in (("return 1 / 0", "ZeroDivisionError"), ("return None", "TypeError"))
        ),
        *(
            (
                "@dataclass(frozen=True)\nclass Flat(LogLogistic):\n    name: str = 'flat'\n"
                f"    def share(self, b, x): return {share}",
                f"family 'flat': {what}",
            )
            for share, what in (
                ("1 / (1 + np.exp(-b * x)) / x.ndim", "share of a column is another"),
                ("np.exp(b * x) / (1 + np.exp(b * x))", "share is not within 0 and 1 at B = 1, log"),
            )
        ),
        ("@dataclass(frozen=True)\nclass Flat(LogLogistic): pass", "two families of curves are named"),
    ],
)
def test_what_is_no_family_is_a_line(here, capsys, code, message):
    imports = "from dataclasses import dataclass\nimport numpy as np\n"
    imports += "from scalerl.curve import Family, LogLogistic\n"
    (here / "flat.py").write_text(imports + code)
    (here / "log.csv").write_text(
        "gpu_hours,pass_rate\n" + "".join(f"{c},{c / (c + 9)}\n" for c in range(30))
    )
    assert main(["fit", "log.csv", "--family", "flat.py:Flat"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
