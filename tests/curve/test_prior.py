"""The numbers of the default prior, and what is recorded of them."""

import math
import re
from pathlib import Path

from scalerl.curve.families import LOG_LOGISTIC
from scalerl.curve.prior import _MID_SD, DEFAULT, USUAL_MID

RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


def test_the_row_of_what_is_shipped_has_the_numbers_of_the_default_prior():
    """Of the table that `benchmarks/prior.py` prints beside what real runs say."""
    (row,) = re.findall(r"^\| shipped \|.*$", RESULTS.read_text(), re.MULTILINE)
    assert DEFAULT.sd is not None
    (b, b_sd), (sd, log_sd) = LOG_LOGISTIC.usual_B, DEFAULT.sd
    normals = (USUAL_MID, _MID_SD), (math.log(b), b_sd), (math.log(sd), log_sd)
    assert [cell.strip() for cell in row.split("|")[3:6]] == [f"{m:.2f} ({s:.2f})" for m, s in normals]
