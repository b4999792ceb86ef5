"""Does the misfit test cry wolf, and what does it find? Simulated runs, healthy and not.

    python benchmarks/misfit.py [--runs 100] [--seed 0] [--records runs/seeds]

Healthy: R_0 .2-.4, gain .2 or .35, noise sd .0045-.010, an evaluation every .06-.10 C_mid up to 1-6 C_mid (12
to 100 of them), half of the runs with a step 0; B 1.2-2.5 unless the family's name says otherwise; `wander`
is a log-logistic with a smooth wander of sd .003-.005. Prints the share of healthy runs that are called a
misfit; then, of runs with a misfit of known size, the share found, named rightly, and placed within a tenth
of the run; then the same by the length of the run: healthy runs, and jumps up and down in the second half
(placed: within two evaluations). `--records` adds what is found in real runs (axis flops), whole and in
their first halves.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Family, Frechet, Gompertz, Points, Weibull
from scalerl.curve.least_squares import LeastSquares, least_squares_many
from scalerl.curve.misfit import Misfit, find_misfit
from scalerl.curve.noise import ar1
from scalerl.curve.sample import make_sample
from scalerl.record.reader import RunRecord

C_MID = 1000.0
LENGTHS, JUMPS = (12, 15, 20, 25, 50), (-0.05, -0.03, 0.03, 0.05)
PHI, RATIOS = (0.0, 0.25, 0.5, 0.8), (1.0, 2.0, 3.5, 6.0)
TRUTHS: dict[str, tuple[Family, float | None]] = {
    "log_logistic": (LOG_LOGISTIC, None),
    "weibull, B .75": (Weibull(), 0.75),
    "weibull, B 1.4": (Weibull(), 1.4),
    "frechet": (Frechet(), None),
    "gompertz": (Gompertz(), None),
    "wander": (LOG_LOGISTIC, None),
}
MISFITS = {
    "peaked": (0.01, 0.02, 0.03, 0.05),
    "jump": (0.02, 0.03, 0.05),
    "regime": (0.03, 0.06, 0.10, 0.20),
}


def grid(ratio: float, rng: np.random.Generator) -> np.ndarray:
    n = max(12, round(ratio / float(rng.uniform(0.06, 0.10))))
    compute_N = np.linspace(0, ratio * C_MID, n + 1)
    return compute_N if rng.random() < 0.5 else compute_N[1:]


def truth(name: str, rng: np.random.Generator) -> Curve:
    family, b = TRUTHS[name]
    r0, gain = float(rng.uniform(0.2, 0.4)), float(rng.choice([0.2, 0.35]))
    return Curve(family, r0 + gain, b or float(rng.uniform(1.2, 2.5)), C_MID, r0)


def wander(compute_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw from a smooth process with a correlation length of .1 to .3 of the run."""
    sd, length = rng.uniform(0.003, 0.005), rng.uniform(0.1, 0.3) * compute_N[-1]
    distance_NN = (compute_N[:, None] - compute_N) / length
    root_NN = np.linalg.cholesky(np.exp(-0.5 * distance_NN**2) + 1e-9 * np.eye(len(compute_N)))
    return sd * root_NN @ rng.normal(size=len(compute_N))


def healthy(name: str, phi: float, ratio: float, rng: np.random.Generator) -> Points:
    compute_N = grid(ratio, rng)
    mean_N = truth(name, rng)(compute_N)
    if name == "wander":
        mean_N = mean_N + wander(compute_N, rng)
    noise_N = ar1(rng.normal(0, float(rng.uniform(0.0045, 0.010)), len(compute_N)), phi)
    return Points.from_arrays(compute_N, np.clip(mean_N + noise_N, 0, 1))


def changed(
    kind: str, size: float, ratio: float, sd: float, phi: float, rng: np.random.Generator
) -> tuple[Points, float]:
    """Return a run with a misfit of known size, and the compute at which it begins."""
    compute_N = grid(ratio, rng)
    curve = truth(str(rng.choice(["log_logistic", "weibull, B 1.4"])), rng)
    low, high = {"peaked": (0.6, 0.85), "jump": (0.3, 0.8), "regime": (0.4, 0.7)}[kind]
    at = float(rng.uniform(low, high)) * compute_N[-1]
    hinge_N = np.maximum(compute_N - at, 0) / (compute_N[-1] - at)
    if kind == "peaked":
        mean_N = np.where(compute_N < at, curve(compute_N), curve(at) - size * hinge_N)
    elif kind == "jump":
        mean_N = curve(compute_N) + size * float(rng.choice([-1, 1])) * (compute_N > at)
    else:
        mean_N = curve(compute_N) + size * hinge_N
    noise_N = ar1(rng.normal(0, sd, len(compute_N)), phi)
    return Points.from_arrays(compute_N, np.clip(mean_N + noise_N, 0, 1)), at


def look(runs: list[Points]) -> tuple[list[Misfit | None], float]:
    """Return the misfit found in every run, and the seconds it took without the least-squares fits."""
    samples = [make_sample(points, None) for points in runs]
    fits: list[list[LeastSquares]] = [least_squares_many(samples, family) for family in FAMILIES]
    start = time.perf_counter()
    found = [find_misfit(points, best) for points, best in zip(runs, zip(*fits, strict=True), strict=True)]
    return [one if one and one.sure else None for one in found], time.perf_counter() - start


def false_alarms(n: int, seed: int) -> None:
    print("Healthy runs called a misfit, by noise correlation and by reach (C/C_mid)")
    print("| truth |" + "".join(f" phi {p:g} |" for p in PHI) + "".join(f" to {r:g} |" for r in RATIOS))
    print("|---|" + "---|" * (len(PHI) + len(RATIOS)))
    rates = np.zeros((len(TRUTHS), len(PHI), len(RATIOS)))
    seconds = 0.0
    for t, name in enumerate(TRUTHS):
        for p, phi in enumerate(PHI):
            for r, ratio in enumerate(RATIOS):
                rng = np.random.default_rng([seed, 0, t, p, r])
                found, took = look([healthy(name, phi, ratio, rng) for _ in range(n)])
                rates[t, p, r] = np.mean([misfit is not None for misfit in found])
                seconds += took
        cells = [*rates[t].mean(axis=1), *rates[t].mean(axis=0)]
        print(f"| {name} |" + "".join(f" {rate:.3f} |" for rate in cells), flush=True)
    print(f"\nall {rates.mean():.4f} of {n * rates.size} runs, largest single cell {rates.max():.3f}; "
          f"{1e3 * seconds / (n * rates.size):.2f} ms a run\n")  # fmt: skip


def power(n: int, seed: int) -> None:
    print("Runs with a misfit, over noise sd .0045 and .0075, phi 0 and .5, reach 2, 3.5 and 6 C_mid")
    print("| kind | size | found | reach 2 | 3.5 | 6 | named rightly | placed |\n|" + "---|" * 8)
    for k, (kind, sizes) in enumerate(MISFITS.items()):
        for size in sizes:
            reach, named, placed = [], [], []
            for ratio in RATIOS[1:]:
                caught = []
                for i, (sd, phi) in enumerate([(0.0045, 0.0), (0.0045, 0.5), (0.0075, 0.0), (0.0075, 0.5)]):
                    rng = np.random.default_rng([seed, 1, k, int(1000 * size), int(10 * ratio), i])
                    runs = [changed(kind, size, ratio, sd, phi, rng) for _ in range(n)]
                    found, _ = look([points for points, _ in runs])
                    caught += [misfit is not None for misfit in found]
                    hits = [(m, at, p) for m, (p, at) in zip(found, runs, strict=True) if m is not None]
                    named += [m.kind == kind for m, _, _ in hits]
                    placed += [
                        abs(m.at - at) < 0.1 * p.compute_N[-1] for m, at, p in hits if m.at is not None
                    ]
                reach.append(float(np.mean(caught)))
            shares = [np.mean(reach), *reach, share(named), share(placed)]
            print(f"| {kind} | {size:.2f} |" + "".join(f" {s:.2f} |" for s in shares), flush=True)


def lengths(n: int, seed: int) -> None:
    """Print a table by length, up to 1-6 C_mid: 4 n jumps of each size and 24 n healthy runs per length."""
    print("\nBy the number of evaluations: healthy runs called a misfit, and jumps in the second half found")
    print("| evaluations | healthy |" + "".join(f" {j:+.2f} |" for j in JUMPS) + " sign right | placed |")
    print("|" + "---|" * (4 + len(JUMPS)))
    for length in LENGTHS:
        alarms, found, signs, placed = [], [], [], []
        for t, name in enumerate(TRUTHS):
            for p, phi in enumerate(PHI):
                rng = np.random.default_rng([seed, 2, length, t, p])
                runs = [
                    short(length, name, None, float(rng.uniform(0.0045, 0.01)), phi, rng) for _ in range(n)
                ]
                alarms += [misfit is not None for misfit in look([points for points, _ in runs])[0]]
        for j, size in enumerate(JUMPS):
            caught = []
            for i, (sd, phi) in enumerate([(0.005, 0.0), (0.005, 0.5), (0.0075, 0.0), (0.0075, 0.5)]):
                rng = np.random.default_rng([seed, 3, length, j, i])
                names = rng.choice(["log_logistic", "weibull, B 1.4"], n)
                runs = [short(length, str(name), size, sd, phi, rng) for name in names]
                for m, (points, first) in zip(look([p for p, _ in runs])[0], runs, strict=True):
                    caught.append(m is not None)
                    if m is not None:
                        signs.append(m.kind == "jump" and m.size * size > 0)
                        where = -9 if m.at is None else int(np.argmin(np.abs(points.compute_N - m.at)))
                        placed.append(abs(where - first) <= 2)
            found.append(share(caught))
        cells = "".join(f" {f:.2f} |" for f in [*found, share(signs), share(placed)])
        print(f"| {length} | {share(alarms):.4f} |{cells}", flush=True)


def short(
    length: int, name: str, size: float | None, sd: float, phi: float, rng: np.random.Generator
) -> tuple[Points, int]:
    """Return a run of `length` evaluations with a jump of `size`, if any, in its second half, and where."""
    compute_N = np.linspace(0, float(rng.uniform(1, 6)) * C_MID, length + 1)
    compute_N = compute_N[:-1] if rng.random() < 0.5 else compute_N[1:]
    first = int(rng.integers(length // 2, length - 3))
    mean_N = truth(name, rng)(compute_N) + (size or 0.0) * (np.arange(length) >= first)
    if name == "wander":
        mean_N = mean_N + wander(compute_N, rng)
    noise_N = ar1(rng.normal(0, sd, length), phi)
    return Points.from_arrays(compute_N, np.clip(mean_N + noise_N, 0, 1)), first


def share(of: list[bool]) -> float:
    return float(np.mean(of)) if of else float("nan")


def records(folder: Path) -> None:
    runs = [Points.from_record(RunRecord.read(path), "flops") for path in sorted(folder.iterdir())]
    halves = [points.select(np.arange(len(points) // 2 + 1)) for points in runs]
    for name, chosen in (("whole", runs), ("first half", halves)):
        found = [misfit for misfit in look(chosen)[0] if misfit is not None]
        print(f"\n{name}: {len(found)} of {len(runs)}", *[misfit.why for misfit in found], sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="healthy runs for each cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, help="a folder of run folders")
    args = parser.parse_args()
    false_alarms(args.runs, args.seed)
    power(max(args.runs // 2, 10), args.seed)
    lengths(args.runs, args.seed)
    if args.records:
        records(args.records)


if __name__ == "__main__":
    main()
