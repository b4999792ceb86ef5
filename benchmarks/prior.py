"""What real runs say of the numbers of the default prior, beside those that are shipped: source by source.

    python benchmarks/prior.py [FOLDER --x steps --y pass_rate]

Every run that is kept in `benchmarks/studies` and `benchmarks/runs`, and of every table and log in FOLDER, is
fitted whole by least squares (log-logistic), and counts where its curve is on no bound. Of the curves of each
source, as seen from 1/4, 1/2 and 3/4 of their compute (six evaluations or more by then): medians, and in
brackets sds by 1.48 times the median deviation, of

    log C_mid / C    C_mid over the largest compute so far      log B, sd     sd of the residuals, its log
    gain             (A - R_0) / (1 - R_0)                      phi           correlation of neighbours

`all sources` is of the medians and deviations of the sources, each counted once, and its sd has the spread
within them as well. `shipped` is `scalerl.curve.prior.DEFAULT`.
"""

from __future__ import annotations

import argparse
import math
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Points
from scalerl.curve.least_squares import least_squares
from scalerl.curve.prior import _GAIN, _MID_SD, DEFAULT, USUAL_MID
from scalerl.curve.sample import MIN_TO_FIT, make_sample
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.load import read_all
from scalerl.ingest.options import ReadOptions
from scalerl.record.reader import RunRecord

HERE, FRACTIONS = Path(__file__).parent, (0.25, 0.5, 0.75)
COLUMNS = ("log C_mid / C", "log B", "gain", "log sd", "phi")


def kept() -> Iterator[tuple[str, Points]]:
    """The runs in the repository, with the name of their study."""
    for archive in sorted(HERE.glob("studies/*.tar.xz")) + sorted(HERE.glob("runs/*.tar.xz")):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            for evals in sorted(Path(folder).rglob("evals.jsonl")):
                run = RunRecord.read(evals.parent)
                yield archive.name.split(".")[0], Points.from_record(run, run.default_axis)


def others(folder: Path, x: str | None, y: str | None) -> Iterator[tuple[str, Points]]:
    """The runs in a folder; a source is what stands before the first underscore of a name."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".csv", ".jsonl", ".log"):
            try:
                yield from (
                    (path.stem.split("_")[0], one.points)
                    for one in read_all(str(path), x, ReadOptions(metric=y), None)
                )
            except (InputError, CannotAnswerError) as error:
                print(f"left out: {error}")


def rows_of(points: Points) -> list[list[float]]:
    """A row of `COLUMNS` for each fraction; none where the curve of the whole run is on a bound."""
    if len(np.unique(points.compute_N)) < MIN_TO_FIT + 1:
        return []
    sample = make_sample(points, None)
    found = least_squares(sample, LOG_LOGISTIC)
    if found.at_bounds:
        return []
    curve, left_N = found.curve, sample.y_N - found.curve.at_log(sample.log_c_N)
    sd = math.sqrt(float(left_N @ left_N) / max(len(left_N) - 4, 1))
    phi = float(np.corrcoef(left_N[1:], left_N[:-1])[0, 1])
    own = [math.log(curve.B), (curve.A - curve.R_0) / (1 - curve.R_0), math.log(sd), phi]
    end_F = [fraction * points.compute_N.max() for fraction in FRACTIONS]
    seen_F = [end for end in end_F if len(np.unique(points.compute_N[points.compute_N <= end])) >= MIN_TO_FIT]
    return [[math.log(curve.C_mid / end), *own] for end in seen_F]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--x")
    parser.add_argument("--y")
    args = parser.parse_args()
    runs = [*kept(), *(others(args.folder, args.x, args.y) if args.folder else [])]
    by_source: dict[str, list[list[list[float]]]] = {}
    for source, points in runs:
        if rows := rows_of(points):
            by_source.setdefault(source, []).append(rows)
    print(f"| source | runs | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    medians, spreads = [], []
    for source, found in by_source.items():
        rows_RC = np.array([row for rows in found for row in rows])
        medians.append(np.median(rows_RC, axis=0))
        spreads.append(1.48 * np.median(np.abs(rows_RC - medians[-1]), axis=0))
        print(_line(source, len(found), medians[-1], spreads[-1]))
    median_C, deviation_SC = np.median(medians, axis=0), np.array(medians) - np.median(medians, axis=0)
    spread_C = np.sqrt(
        (1.48 * np.median(np.abs(deviation_SC), axis=0)) ** 2 + np.mean(np.square(spreads), axis=0)
    )
    print(_line("all sources", sum(map(len, by_source.values())), median_C, spread_C))
    (b, b_sd), (a, c), sd = LOG_LOGISTIC.usual_B, _GAIN, DEFAULT.sd or (math.nan, math.nan)
    gain_sd = math.sqrt(a * c / (a + c) ** 2 / (a + c + 1))
    shipped = [(USUAL_MID, _MID_SD), (math.log(b), b_sd), (a / (a + c), gain_sd), (math.log(sd[0]), sd[1])]
    print(_line("shipped", 0, *np.array([*shipped, (math.nan, math.nan)]).T))


def _line(name: str, runs: int, median_C: np.ndarray, spread_C: np.ndarray) -> str:
    cells = [
        f"{m:.2f} ({s:.2f})" if math.isfinite(m) else "" for m, s in zip(median_C, spread_C, strict=True)
    ]
    return f"| {name} | {runs or ''} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
