"""What real runs say of the numbers of the default prior, beside those that are shipped.

    python benchmarks/prior.py [FOLDER --x steps --y pass_rate]

Every run that is kept in `benchmarks/studies`, and of every table in FOLDER, is fitted whole, and the
normal distributions of

    log C_mid / C    C_mid over the largest compute so far, as seen from 1/4, 1/2 and 3/4 of the run
    log B            of the families without a B of their own
    log sd           of the noise of one evaluation

are those that make all runs likeliest, by EM: the nodes of a run's posterior are weighted anew
by the distributions so far, and these are moved to their mean and variance. So a run that has not bent counts
with all that it may become, where least squares would leave it out. A source is what one group of people
trained of one model on one task: each counts once, however many runs it has. `one more source`
has (k + 1) / (k - 1) times the variance between the k sources, as they are a sample.

The gain, the share of runs that fall and the weights of families and noise stay as they are: of six sources
no likelihood tells how often a run is flat, and `coverage.py --shapes flat` does. `gain` is what the runs'
posteriors have on average, (A - R_0) / (1 - R_0).
"""

from __future__ import annotations

import argparse
import math
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Points, fit
from scalerl.curve.prior import _GAIN, _MID_SD, DEFAULT, USUAL_MID
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.load import read_all
from scalerl.ingest.options import ReadOptions
from scalerl.record.reader import RunRecord

HERE, FRACTIONS, STEPS = Path(__file__).parent, (0.25, 0.5, 0.75), 40
COLUMNS = ("log C_mid / C", "log B", "log sd", "gain")
Normal = tuple[float, float]
"""Mean and sd."""


@dataclass(frozen=True)
class Run:
    """The posterior of one run: nodes of each quantity in `COLUMNS`, and their weights."""

    source: str
    log_mid_c: np.ndarray
    """Log C_mid over the compute of the whole run, for the c cells of (B, C_mid)."""
    log_b_c: np.ndarray
    usual_c: np.ndarray
    """Which cells belong to families that share the log-logistic's prior of B."""
    weight_c: np.ndarray
    log_sd_J: np.ndarray
    sd_weight_J: np.ndarray
    gain_n: np.ndarray
    gain_weight_n: np.ndarray

    def moments(self, then: Sequence[Normal], now: Sequence[Normal]) -> np.ndarray:
        """Return mass, first and second moment of every quantity under the prior `now` instead of `then`."""
        mid, b, sd = ((one, other) for one, other in zip(then, now, strict=True))
        log_c = _log_ratio(self.log_mid_c, *mid) + self.usual_c * _log_ratio(self.log_b_c, *b)
        weight_c = _to_one(self.weight_c * np.exp(log_c))
        sd_J = _to_one(self.sd_weight_J * np.exp(_log_ratio(self.log_sd_J, *sd)))
        nodes = (self.log_mid_c, weight_c), (self.log_b_c, weight_c * self.usual_c)
        nodes += (self.log_sd_J, sd_J), (self.gain_n, self.gain_weight_n)
        return np.array([[w.sum(), w @ value, w @ value**2] for value, w in nodes])


def _log_ratio(value_n: np.ndarray, then: Normal, now: Normal) -> np.ndarray:
    (mean, sd), (mean_now, sd_now) = then, now
    return (
        0.5 * ((value_n - mean) / sd) ** 2
        - 0.5 * ((value_n - mean_now) / sd_now) ** 2
        + math.log(sd / sd_now)
    )


def _to_one(weight_n: np.ndarray) -> np.ndarray:
    return weight_n / weight_n.sum()


def kept() -> Iterator[tuple[str, Points]]:
    """Yield the runs in the repository with their source: all but one study share a task and a model."""
    for archive in sorted(HERE.glob("studies/*.tar.xz")):
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            for evals in sorted(Path(folder).rglob("evals.jsonl")):
                run = RunRecord.read(evals.parent)
                source = "smollm2" if archive.name.startswith("smollm2") else "demonstration"
                yield source, Points.from_record(run, run.default_axis)


def others(folder: Path, x: str | None, y: str | None) -> Iterator[tuple[str, Points]]:
    """Yield the runs in a folder; the source is the file name up to its first underscore."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".csv", ".jsonl", ".log"):
            try:
                yield from (
                    (path.stem.split("_")[0], one.points)
                    for one in read_all(str(path), x, ReadOptions(metric=y), None)
                )
            except (InputError, CannotAnswerError) as error:
                print(f"left out: {error}")


def fitted(source: str, points: Points) -> Run | None:
    """Return the posterior of a whole run under the default prior; None if it has too few evaluations."""
    try:
        result = fit(points)
    except CannotAnswerError:
        return None
    post = result.posterior
    usual_F = np.array([family.usual_B == LOG_LOGISTIC.usual_B for family in post.families])
    room = np.maximum(np.where(post.A < post.R_0, post.R_0, 1.0 - post.R_0), 1e-6)
    return Run(
        source=source,
        log_mid_c=post.log_mid_cells - result.sample.log_c_range[1],
        log_b_c=post.log_b_cells,
        usual_c=usual_F[post.family_cells],
        weight_c=post.weight_cells,
        log_sd_J=np.log(post.sd_J),
        sd_weight_J=post.sd_weight_J,
        gain_n=np.minimum(np.abs(post.A - post.R_0) / room, 1.0).ravel(),
        gain_weight_n=post.weight.ravel(),
    )


def estimate(runs: Sequence[Run]) -> tuple[list[Normal], dict[str, list[Normal]]]:
    """Return the distributions of one more source, and those of each source, by EM from the shipped ones."""
    then = now = shipped()[:3]
    sources = list(dict.fromkeys(run.source for run in runs))
    for _ in range(STEPS):
        now = _pooled(*_moments(runs, sources, then, now), 1.0)[:3]
    k, moments = len(sources), _moments(runs, sources, then, now)
    by_source = {source: _seen(_normals(m, v)) for source, _, m, v in zip(sources, *moments, strict=True)}
    return _seen(_pooled(*moments, (k + 1) / max(k - 1, 1))), by_source


def _moments(
    runs: Sequence[Run], sources: Sequence[str], then: Sequence[Normal], now: Sequence[Normal]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mass, mean and variance of every quantity in every source, (S, C) each."""
    of_S = [[run.moments(then, now) for run in runs if run.source == source] for source in sources]
    mass_SC, first_SC, second_SC = np.moveaxis(np.array([np.mean(each, axis=0) for each in of_S]), 2, 0)
    mean_SC = first_SC / mass_SC
    return mass_SC, mean_SC, second_SC / mass_SC - mean_SC**2


def _pooled(mass_SC: np.ndarray, mean_SC: np.ndarray, within_SC: np.ndarray, more: float) -> list[Normal]:
    """Pool sources once each, weighted by mass: a source whose runs are likely ramps says little of B."""
    weight_SC = mass_SC / mass_SC.sum(axis=0)
    mean_C = np.sum(weight_SC * mean_SC, axis=0)
    return _normals(mean_C, np.sum(weight_SC * (within_SC + more * (mean_SC - mean_C) ** 2), axis=0))


def _normals(mean_C: np.ndarray, variance_C: np.ndarray) -> list[Normal]:
    return [(float(m), math.sqrt(v)) for m, v in zip(mean_C, variance_C, strict=True)]


def _seen(found: list[Normal]) -> list[Normal]:
    """Return the distributions with C_mid relative to the compute at `FRACTIONS` of a run, not all of it."""
    ahead = [-math.log(fraction) for fraction in FRACTIONS]
    (mean, sd), *rest = found
    return [(mean + float(np.mean(ahead)), math.hypot(sd, float(np.std(ahead)))), *rest]


def shipped() -> list[Normal]:
    """Return the numbers of `scalerl.curve.prior.DEFAULT`."""
    (b, b_sd), (first, second), (sd, log_sd) = LOG_LOGISTIC.usual_B, _GAIN, DEFAULT.sd or (math.nan, math.nan)
    total = first + second
    gain = first / total, math.sqrt(first * second / (total + 1)) / total
    return [(USUAL_MID, _MID_SD), (math.log(b), b_sd), (math.log(sd), log_sd), gain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--x")
    parser.add_argument("--y")
    args = parser.parse_args()
    named = [*kept(), *(others(args.folder, args.x, args.y) if args.folder else [])]
    runs = [run for source, points in named if (run := fitted(source, points))]
    found, by_source = estimate(runs)
    print(f"| source | runs | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for source, of in by_source.items():
        print(_line(source, sum(run.source == source for run in runs), of))
    print(_line("one more source", len(runs), found))
    for source in by_source if len(by_source) > 2 else ():
        rest = [run for run in runs if run.source != source]
        print(_line(f"without {source}", len(rest), estimate(rest)[0]))
    print(_line("shipped", 0, shipped()))


def _line(name: str, runs: int, of: Sequence[Normal]) -> str:
    return f"| {name} | {runs or ''} | {' | '.join(f'{m:.2f} ({s:.2f})' for m, s in of)} |"


if __name__ == "__main__":
    main()
